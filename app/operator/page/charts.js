// Pictures as SVG, drawn by hand: plots, blocks, slots, and the phases of a request.
// Owns shapes and scales; colours come from the style sheet, so that light and dark need nothing here.

const SVG = "http://www.w3.org/2000/svg";

export function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The next of 1, 2, 5, 10, ... that is at least `value`. */
export function niceMax(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function frameOf(svg) {
  const width = Math.max(200, svg.clientWidth);
  const height = Math.max(80, svg.clientHeight);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { left: 44, right: width - 10, top: 8, bottom: height - 18, width, height };
}

function axes(box, max, format, windowS) {
  const nodes = [];
  for (const part of [0, 0.5, 1]) {
    const y = box.bottom - part * (box.bottom - box.top);
    nodes.push(shape("line", { class: part ? "grid" : "axis", x1: box.left, x2: box.right, y1: y, y2: y }));
    nodes.push(shape("text", { class: "tick", x: box.left - 6, y: y + 3.5, "text-anchor": "end" }, format(part * max)));
  }
  for (let ago = 0; ago <= windowS; ago += 60) {
    const x = box.right - (ago / windowS) * (box.right - box.left);
    const anchor = ago === 0 ? "end" : ago === windowS ? "start" : "middle";
    nodes.push(shape("text", { class: "tick", x, y: box.height - 4, "text-anchor": anchor }, ago ? `−${ago / 60} min` : "now"));
  }
  return nodes;
}

/** `values`: one a second, the latest last. */
export function drawArea(svg, values, format) {
  const box = frameOf(svg);
  const max = niceMax(Math.max(10, ...values));
  const step = (box.right - box.left) / Math.max(1, values.length - 1);
  const points = values.map((value, n) => {
    const y = box.bottom - (Math.min(value, max) / max) * (box.bottom - box.top);
    return `${(box.left + n * step).toFixed(1)},${y.toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  svg.replaceChildren(
    ...axes(box, max, format, values.length),
    shape("path", { class: "area", d: `${line}L${box.right},${box.bottom}L${box.left},${box.bottom}Z` }),
    shape("path", { class: "line", d: line }),
  );
}

/** `dots`: [time, value], both in milliseconds. */
export function drawDots(svg, dots, nowMs, windowS, format) {
  const box = frameOf(svg);
  const max = niceMax(Math.max(10, ...dots.map(([, value]) => value)));
  svg.replaceChildren(
    ...axes(box, max, format, windowS),
    ...dots.map(([at, value]) => {
      const cx = box.right - ((nowMs - at) / 1000 / windowS) * (box.right - box.left);
      const cy = box.bottom - (value / max) * (box.bottom - box.top);
      return shape("circle", { class: "dot", cx: Math.min(box.right, cx).toFixed(1), cy: cy.toFixed(1), r: 2.6 });
    }),
  );
}

/** `count` small squares in rows of `columns`, the first `used` of them filled. */
export function drawCells(svg, used, count, columns, size) {
  const pitch = size + 2;
  const square = (n) => `M${(n % columns) * pitch},${Math.floor(n / columns) * pitch}h${size}v${size}h-${size}z`;
  const path = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, n) => square(from + n)).join("");
  const rows = Math.ceil(count / columns);
  svg.setAttribute("viewBox", `0 0 ${columns * pitch - 2} ${Math.max(1, rows) * pitch - 2}`);
  svg.setAttribute("preserveAspectRatio", "xMinYMid meet");
  svg.replaceChildren(
    shape("path", { class: "cell", d: path(used, count) }),
    shape("path", { class: "cell used", d: path(0, used) }),
  );
}

/** `phases`: { phase, from, to, label }, one after the other; drawn to scale, none thinner than 3. */
export function drawPhases(svg, phases) {
  const width = Math.max(200, svg.clientWidth);
  const total = Math.max(1, ...phases.map((one) => one.to - phases[0].from));
  svg.setAttribute("viewBox", `0 0 ${width} 34`);
  svg.replaceChildren(
    ...phases.flatMap((one) => {
      const x = ((one.from - phases[0].from) / total) * (width - 3);
      const length = Math.max(3, ((one.to - one.from) / total) * (width - 3));
      const nodes = [shape("rect", { class: "phase", "data-phase": one.phase, x, y: 4, width: length, height: 26, rx: 3 })];
      if (one.label && length > one.label.length * 7 + 10) {
        nodes.push(shape("text", { class: "phase-label", "data-phase": one.phase, x: x + 7, y: 21 }, one.label));
      }
      return nodes;
    }),
  );
}
