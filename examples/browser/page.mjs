import * as ort from "./ort/ort.wasm.min.mjs";
import { Stream } from "./stream.mjs";

const BATCH = 32, SIDE = 8, PIXELS = SIDE * SIDE, PAUSE = 200; // milliseconds between batches
const RECENT = 10, SHOWN = 60; // batches behind an accuracy, and in the sparkline
const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(0)} %`;

ort.env.wasm.numThreads = 1; // threads need headers that plain file servers do not send
const quiet = { logSeverityLevel: 3 }; // or warnings go to the console, as errors
const load = (name) => ort.InferenceSession.create(name, quiet);
const [frozen, adaptive, digits] = await Promise.all([
  load("digits.onnx"), load("adaptive.onnx"), fetch("digits.json").then((r) => r.json()),
]).catch(fail);
const images = Float32Array.from(atob(digits.images), (c) => c.charCodeAt(0) / digits.white);
const stream = new Stream(ort, adaptive);

let order, next, history, yours = null;
let running = false, wantsReset = true, wantsStep = false; // wishes that `loop` fulfils in turn

// --- the stream -------------------------------------------------------------------------------

function reset() {
  stream.reset();
  order = shuffled(digits.labels.length);
  next = 0;
  history = [];
  $("digits").replaceChildren();
  for (const line of document.querySelectorAll("polyline")) line.setAttribute("points", "");
  for (const id of ["frozen", "adapted"]) $(id).textContent = "–";
  $("batches").textContent = 0;
  $("measured").textContent = "";
  $("verdict").style.borderColor = "";
  say("decision", "Ready.");
}

function nextBatch() { // pixels (BATCH, 1, 8, 8) and labels, null for your own digit
  const pixels = new Float32Array(BATCH * PIXELS), labels = [];
  for (let row = 0; row < BATCH; row++) {
    if (row === 0 && yours) {
      pixels.set(yours);
      labels.push(null);
      continue;
    }
    if (next === order.length) [order, next] = [shuffled(order.length), 0];
    const index = order[next++];
    pixels.set(images.subarray(index * PIXELS, (index + 1) * PIXELS), row * PIXELS);
    labels.push(digits.labels[index]);
  }
  for (let row = 0; row < BATCH; row++) shift(pixels.subarray(row * PIXELS, (row + 1) * PIXELS));
  return { pixels, labels };
}

function shift(image) { // fog, then contrast, then noise, in place
  const [noise, fog, contrast] = ["noise", "fog", "contrast"].map((id) => $(id).value / 100);
  for (let i = 0; i < PIXELS; i++) image[i] = (1 - fog) * image[i] + fog / 2;
  const mean = image.reduce((a, b) => a + b) / PIXELS;
  for (let i = 0; i < PIXELS; i++) {
    const value = mean + contrast * (image[i] - mean) + noise * normal();
    image[i] = Math.min(1, Math.max(0, value));
  }
}

async function step() {
  const { pixels, labels } = nextBatch();
  const batch = new ort.Tensor("float32", pixels, [BATCH, 1, SIDE, SIDE]);
  const { logits } = await frozen.run({ images: batch });
  const out = await stream.run(batch);
  const answers = { frozen: argmax(logits), adapted: Array.from(out.labels.data, Number) };
  const known = labels.filter((label) => label !== null).length;
  const right = (given) => given.filter((label, row) => label === labels[row]).length / known;
  history.push({ frozen: right(answers.frozen), adapted: right(answers.adapted) });
  showBatch(pixels, labels, answers);
  showAccuracy();
  showVerdict(out);
}

async function loop() {
  for (;;) {
    if (wantsReset) reset();
    if (running || wantsStep) await step();
    wantsReset = wantsStep = false;
    await new Promise((resume) => setTimeout(resume, PAUSE));
  }
}

// --- what it shows ------------------------------------------------------------------------------

function showBatch(pixels, labels, answers) {
  const list = $("digits");
  while (list.children.length < BATCH) list.append(digitItem());
  [...list.children].forEach((item, row) => {
    paint(item.querySelector("canvas"), pixels.subarray(row * PIXELS, (row + 1) * PIXELS));
    const label = labels[row];
    item.classList.toggle("yours", label === null);
    ["frozen", "adapted"].forEach((name, column) => {
      const element = item.querySelectorAll(".answer span")[column], answer = answers[name][row];
      element.textContent = answer;
      element.className = label === null || answer === label ? "" : "wrong";
    });
  });
  if (labels[0] === null) {
    const [before, after] = [answers.frozen[0], answers.adapted[0]];
    say("yours", `The frozen network sees a ${before}, the adapted one a ${after}.`);
  }
}

function digitItem() {
  const item = document.createElement("li");
  item.innerHTML = `<canvas width="${SIDE}" height="${SIDE}" aria-hidden="true"></canvas>
    <span class="answer"><span></span><span></span></span>`;
  return item;
}

function showAccuracy() {
  const recent = (end, name) => {
    const last = history.slice(Math.max(0, end - RECENT), end);
    return last.reduce((sum, batch) => sum + batch[name], 0) / last.length;
  };
  const first = Math.max(1, history.length - SHOWN + 1), words = [];
  for (const name of ["frozen", "adapted"]) {
    const points = [];
    for (let end = first; end <= history.length; end++)
      points.push(`${((end - first) / (SHOWN - 1)) * 100},${98 - 96 * recent(end, name)}`);
    document.querySelector(`polyline.${name}`).setAttribute("points", points.join(" "));
    $(name).textContent = percent(recent(history.length, name));
    words.push(`${name} ${$(name).textContent}`);
  }
  $("sparkline").setAttribute("aria-label", `Accuracy now: ${words.join(", ")}`);
  $("batches").textContent = history.length;
}

function showVerdict({ accepted, ratio, reason }) {
  const yes = Boolean(accepted.data[0]), value = ratio.data[0];
  const why = digits.reasons[Number(reason.data[0])];
  say("decision", `${yes ? "Accepted" : "Rejected"}. ${why[0].toUpperCase()}${why.slice(1)}.`);
  const measured = Number.isFinite(value) ? `Ratio ${value.toFixed(2)}` : "No ratio measured";
  $("measured").textContent = `${measured}; accepted up to ${digits.tau.toFixed(2)}.`;
  $("verdict").style.borderColor = `var(--${yes ? "adapted" : "frozen"})`;
}

function say(id, text) { // a status is read aloud, so only when it changes
  if ($(id).textContent !== text) $(id).textContent = text;
}

function paint(canvas, image) { // ink is white
  const context = canvas.getContext("2d"), data = context.createImageData(SIDE, SIDE);
  image.forEach((value, i) => data.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i));
  context.putImageData(data, 0, 0);
}

// --- your own digit -----------------------------------------------------------------------------

const ink = $("draw").getContext("2d", { willReadFrequently: true });
ink.strokeStyle = ink.fillStyle = "white";
ink.lineCap = ink.lineJoin = "round";
ink.lineWidth = 3.5;

function position(event) {
  const box = $("draw").getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top].map((x) => (x / box.width) * 32);
}

$("draw").addEventListener("pointerdown", (event) => {
  $("draw").setPointerCapture(event.pointerId);
  ink.beginPath();
  ink.moveTo(...position(event));
});
$("draw").addEventListener("pointermove", (event) => {
  if (!event.buttons) return;
  ink.lineTo(...position(event));
  ink.stroke();
});
$("draw").addEventListener("pointerup", () => take());

$("upload").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = ""; // the same file may be chosen again
  if (!file) return;
  const bitmap = await createImageBitmap(file).catch(() => null);
  clear();
  if (bitmap === null) say("yours", "This file is not an image that the browser can read.");
  else keepInk(bitmap);
});
$("clear").addEventListener("click", clear);

function clear() {
  ink.clearRect(0, 0, 32, 32);
  $("seen").getContext("2d").clearRect(0, 0, SIDE, SIDE);
  yours = null;
  say("yours", "Nothing drawn yet.");
}

function keepInk(bitmap) { // ink is what differs from the corner, which is taken for paper
  const scale = 32 / Math.max(bitmap.width, bitmap.height);
  const [w, h] = [bitmap.width, bitmap.height].map((n) => Math.max(1, Math.round(scale * n)));
  ink.fillRect(0, 0, w, h); // white, under transparent images
  ink.drawImage(bitmap, 0, 0, w, h);
  const image = ink.getImageData(0, 0, w, h);
  const grey = (i) => 0.3 * image.data[i] + 0.6 * image.data[i + 1] + 0.1 * image.data[i + 2];
  const contrast = Array.from({ length: w * h }, (_, i) => Math.abs(grey(4 * i) - grey(0)));
  const half = Math.max(...contrast) / 2;
  contrast.forEach((c, i) => image.data.fill(c > half ? 255 : 0, 4 * i, 4 * i + 4));
  ink.putImageData(image, 0, 0);
  take();
}

function take() { // as the digits were made: cropped, scaled to the frame, counted in blocks
  const { data } = ink.getImageData(0, 0, 32, 32);
  const isInk = (x, y) => data[4 * (32 * y + x) + 3] > 127;
  const xs = [], ys = [];
  for (let y = 0; y < 32; y++)
    for (let x = 0; x < 32; x++) if (isInk(x, y)) xs.push(x), ys.push(y);
  if (!xs.length) return;
  const [left, right] = [Math.min(...xs), Math.max(...xs) + 1];
  const [top, bottom] = [Math.min(...ys), Math.max(...ys) + 1];
  const scale = Math.max(right - left, bottom - top) / 32;
  yours = new Float32Array(PIXELS);
  for (let y = 0; y < 32; y++)
    for (let x = 0; x < 32; x++) {
      const u = Math.floor((left + right) / 2 + scale * (x - 15.5));
      const v = Math.floor((top + bottom) / 2 + scale * (y - 15.5));
      if (u >= left && u < right && v >= top && v < bottom && isInk(u, v))
        yours[SIDE * (y >> 2) + (x >> 2)] += 1 / 16;
    }
  paint($("seen"), yours);
  wantsStep = true;
}

// --- small parts --------------------------------------------------------------------------------

function fail(error) {
  say("decision", `The page cannot go on: ${error.message}`);
  throw error;
}

function shuffled(n) {
  const rows = [...Array(n).keys()];
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [rows[i], rows[j]] = [rows[j], rows[i]];
  }
  return rows;
}

function normal() { // Box and Muller
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

function argmax({ data, dims: [rows, classes] }) {
  return Array.from({ length: rows }, (_, row) => {
    const scores = data.subarray(row * classes, (row + 1) * classes);
    return scores.indexOf(Math.max(...scores));
  });
}

// --- controls -----------------------------------------------------------------------------------

function setRunning(on) {
  running = on;
  $("start").textContent = on ? "Pause" : "Start";
}

$("start").addEventListener("click", () => setRunning(!running));
$("reset").addEventListener("click", () => (wantsReset = true));
for (const slider of document.querySelectorAll("input[type=range]")) {
  const show = () => (slider.nextElementSibling.value = `${slider.value} %`);
  slider.addEventListener("input", show);
  show();
}
for (const id of ["start", "reset"]) $(id).disabled = false;
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) setRunning(true);
loop().catch(fail);
