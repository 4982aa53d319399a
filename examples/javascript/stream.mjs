// A stream of batches through a compiled file: every output next.X becomes the input X
// of the next batch. A stream starts from zeros of the declared shapes.

const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array,
  bool: Uint8Array };

export class Stream {
  constructor(ort, session) {
    this.ort = ort;
    this.session = session;
    const isState = ({ name }) => session.outputNames.includes(`next.${name}`);
    this.inputs = session.inputMetadata.filter(isState);
    this.images = session.inputMetadata.find((input) => !isState(input)).name;
    this.reset();
  }

  reset() {
    const zeros = ({ name, type, shape }) => {
      const data = new ARRAYS[type](shape.reduce((a, b) => a * b, 1));
      return [name, new this.ort.Tensor(type, data, shape)];
    };
    this.state = Object.fromEntries(this.inputs.map(zeros));
  }

  async run(images) { // an ort.Tensor: probabilities, labels, accepted, ratio, reason
    const out = await this.session.run({ [this.images]: images, ...this.state });
    this.state = Object.fromEntries(this.inputs.map(({ name }) => [name, out[`next.${name}`]]));
    return out;
  }
}
