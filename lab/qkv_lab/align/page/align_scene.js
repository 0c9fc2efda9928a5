// Drawing a scene, with a brightness that shows attention weights.

/** Draw a scene at `scale` screen pixels per pixel; with `light`, the brightness of a part shows the weight on it. */
export function drawScene(canvas, { size, pixels, gh, gw }, scale, light = null) {
  const side = size * scale, stride = [size / gh, size / gw];
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"), image = context.createImageData(side, side);
  const top = light ? Math.max(...light.weights.flat(), 1e-9) : 1;
  // Cell (i, j) of the convolutional grid is centred on pixel (i, j) · stride; it is not a square of pixels.
  const neighbours = [0, 1].map((axis) => Array.from({ length: side }, (_, p) => {
    const cells = axis ? gw : gh, at = Math.min(Math.max(((p + 0.5) / scale - 0.5) / stride[axis], 0), cells - 1);
    const low = light && !light.smooth ? Math.round(at) : Math.floor(at);
    return [low, Math.min(low + 1, cells - 1), light && !light.smooth ? 0 : at - low];
  }));
  for (let y = 0, to = 0; y < side; y++) {
    const [i, i2, down] = neighbours[0][y];
    for (let x = 0; x < side; x++, to += 4) {
      let brightness = 1;
      if (light) {
        const [j, j2, right] = neighbours[1][x], { weights } = light;
        const weight = (1 - down) * ((1 - right) * weights[i][j] + right * weights[i][j2]) + down * ((1 - right) * weights[i2][j] + right * weights[i2][j2]);
        brightness = 1 - light.dark * (1 - weight / top);
      }
      const from = 3 * (Math.floor(y / scale) * size + Math.floor(x / scale));
      for (let channel = 0; channel < 3; channel++) image.data[to + channel] = brightness * pixels[from + channel];
      image.data[to + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}
