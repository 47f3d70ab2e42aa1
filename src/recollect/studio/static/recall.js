// Recall (eqn 2), in the browser: a picture is a sum of what each base adds to it, upsampled bilinearly.

/** sum_k v_k L(B_k) + undo(0), of pictures [K + 1, C, h, w] whose last is undo(0); a Float32Array [C, h, w]. */
export function mix(pictures, [many, ...shape], coefficients) {
  const size = shape.reduce((a, b) => a * b, 1);
  const image = new Float64Array(pictures.subarray((many - 1) * size, many * size));
  for (let k = 0; k < many - 1; k++) {
    const weight = coefficients[k];
    if (weight === 0) continue;
    for (let i = 0, at = k * size; i < size; i++, at++) image[i] += weight * pictures[at];
  }
  return image;
}

/** Bilinear, corners not aligned, as torch's interpolate does it. */
export function upsample(image, [channels, h, w], [height, width]) {
  if (h === height && w === width) return image;
  const out = new Float64Array(channels * height * width);
  const rows = places(h, height), columns = places(w, width);
  for (let c = 0, at = 0; c < channels; c++) {
    for (const [top, bottom, down] of rows) {
      const above = (c * h + top) * w, below = (c * h + bottom) * w;
      for (const [left, right, over] of columns) {
        const upper = image[above + left] * (1 - over) + image[above + right] * over;
        const lower = image[below + left] * (1 - over) + image[below + right] * over;
        out[at++] = upper * (1 - down) + lower * down;
      }
    }
  }
  return out;
}

/** For each place along a side: the two it lies between, and how far it is towards the second. */
function places(from, to) {
  return Array.from({ length: to }, (_, place) => {
    const source = Math.max(0, ((place + 0.5) * from) / to - 0.5);
    const first = Math.min(Math.floor(source), from - 1);
    return [first, Math.min(first + 1, from - 1), source - first];
  });
}

/** Pixels in 0..1, [C, H, W], onto a canvas of that size. Of other than 1 or 3 channels the first is shown. */
export function paint(canvas, image, [channels, height, width]) {
  canvas.width = width;
  canvas.height = height;
  const area = height * width;
  const pixels = new ImageData(width, height);
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = Math.round(255 * Math.min(1, Math.max(0, image[channels === 3 ? c * area + i : i])));
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** A base by itself has values on both sides of 0: stretched to 0..1 for looking at. */
export function stretched(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return values.map((value) => (value - low) / (high - low || 1));
}
