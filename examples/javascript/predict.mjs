// Classify images with an adaptive model: node predict.mjs adaptive.onnx images.npy [batch size]
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web"; // or onnxruntime-node, which is faster
import { Stream } from "./stream.mjs";

const [model, images, size = 64] = process.argv.slice(2);
ort.env.wasm.numThreads = 1;
const stream = new Stream(ort, await ort.InferenceSession.create(readFileSync(model)));
const [pixels, [rows, ...shape]] = readNpy(images);
const step = shape.reduce((a, b) => a * b, 1); // pixels of an image
for (let start = 0; start < rows; start += Number(size)) {
  const stop = Math.min(rows, start + Number(size));
  const data = pixels.subarray(start * step, stop * step);
  const out = await stream.run(new ort.Tensor("float32", data, [stop - start, ...shape]));
  const verdict = out.accepted.data[0] ? "accepted" : `rejected, reason ${out.reason.data[0]}`;
  console.log(`${verdict}, ratio ${out.ratio.data[0].toFixed(3)}: ${out.labels.data.join(" ")}`);
}

function readNpy(path) { // float32, in C order, as numpy.save writes it
  const file = readFileSync(path);
  const header = file.toString("latin1", 10, 10 + file.readUInt16LE(8));
  if (!header.includes("'<f4'") || header.includes("True")) throw new Error(`${path}: not float32`);
  const shape = header.match(/\(([\d, ]+)\)/)[1].match(/\d+/g).map(Number);
  return [new Float32Array(new Uint8Array(file.subarray(10 + header.length)).buffer), shape];
}
