"use strict";
// The map: nodes as boxes, a cell a rank; ranks that talk to each other along the chosen axis have one colour.
(() => {
  const found = report.data("ranks-data"), box = document.getElementById("ranks-box"), canvas = document.getElementById("ranks-canvas");
  const select = document.getElementById("axis"), where = document.getElementById("ranks-where");
  const real = found.axes.filter((one) => one.size > 1), nodes = Math.ceil(found.world / found.node);
  const coord = (rank, one) => Math.floor(rank / one.stride) % one.size;
  const axis = (name) => found.axes.find((one) => one.name === name);
  // Place of a rank on the expert mesh, which numbers the ranks of a replica anew.
  const expert = (rank) => {
    let number = 0, stride = 1;
    for (const name of found.experts.plane) { number += coord(rank, axis(name)) * stride; stride *= axis(name).size; }
    const part = number % found.experts.part, rest = Math.floor(number / found.experts.part);
    return { part, expert: rest % found.experts.size, copy: Math.floor(rest / found.experts.size), copies: stride };
  };
  // The group of a rank along an axis: its other coordinates. A stage is the pipeline coordinate itself.
  const group = (rank) => {
    if (select.value === "stage") return coord(rank, axis("pipeline"));
    if (select.value === "expert") {
      const at = expert(rank), replica = coord(rank, axis("pipeline")) * axis("replicate").size + coord(rank, axis("replicate"));
      return (replica * at.copies + at.copy) * found.experts.part + at.part;
    }
    return found.axes.filter((one) => one.name !== select.value).reduce((all, one) => all * one.size + coord(rank, one), 0);
  };
  if (axis("pipeline").size > 1) select.add(new Option("stage of the pipeline", "stage"));
  real.forEach((one) => select.add(new Option(one.name + " group (" + one.size + " ranks)", one.name)));
  if (found.experts) select.add(new Option("expert group (" + found.experts.size + " ranks)", "expert"));
  if (!select.options.length) select.add(new Option("one rank", "tensor"));

  const hue = (g) => {
    if (select.value === "stage") { return 210 + 300 * g / axis("pipeline").size; }
    return 210 + g * 137.508; // golden angle: neighbouring groups stay far apart
  };
  // The largest cells with which the map is no taller than a screen.
  const layout = (width) => {
    const most = Math.max(280, Math.min(620, innerHeight * 0.8));
    let best;
    for (const cell of [26, 20, 15, 11, 8, 6, 4, 3]) { best = arrange(cell, width); if (best.height <= most) break; }
    return best;
  };
  const arrange = (cell, width) => {
    const across = Math.min(found.node, found.node <= 8 ? found.node : Math.ceil(Math.sqrt(found.node))), down = Math.ceil(found.node / across);
    const pad = cell > 9 ? 5 : cell > 4 ? 2 : 1, w = across * cell + 2 * pad, h = down * cell + 2 * pad;
    const columns = Math.max(1, Math.min(nodes, Math.floor((width - 8) / (w + pad))));
    return { cell, across, down, pad, w, h, columns, height: Math.ceil(nodes / columns) * (h + pad) + 8 };
  };
  const place = (rank, l) => {
    const node = Math.floor(rank / found.node), at = rank % found.node;
    return [4 + (node % l.columns) * (l.w + l.pad) + l.pad + (at % l.across) * l.cell, 4 + Math.floor(node / l.columns) * (l.h + l.pad) + l.pad + Math.floor(at / l.across) * l.cell];
  };
  let chosen = -1;
  const draw = () => {
    const width = box.clientWidth, l = layout(width), [pen] = report.sharp(canvas, l.height), light = report.dark() ? 52 : 58;
    pen.clearRect(0, 0, width, l.height);
    pen.strokeStyle = report.colour("--line");
    for (let node = 0; node < nodes; node++) pen.strokeRect(4.5 + (node % l.columns) * (l.w + l.pad), 4.5 + Math.floor(node / l.columns) * (l.h + l.pad), l.w, l.h);
    const own = chosen >= 0 ? group(chosen) : -1, gap = l.cell > 9 ? 2 : 1;
    for (let rank = 0; rank < found.world; rank++) {
      const [x, y] = place(rank, l), g = group(rank);
      pen.globalAlpha = own < 0 || g === own ? 1 : 0.25;
      pen.fillStyle = `hsl(${hue(g) % 360} 55% ${light}%)`;
      pen.fillRect(x, y, l.cell - gap, l.cell - gap);
      if (l.cell >= 26) { pen.fillStyle = "#fff"; pen.font = "10px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle"; pen.fillText(rank, x + (l.cell - gap) / 2, y + (l.cell - gap) / 2 + 0.5); }
    }
    pen.globalAlpha = 1;
  };
  const at = (e) => {
    const l = layout(box.clientWidth), column = Math.floor((e.offsetX - 4) / (l.w + l.pad)), row = Math.floor((e.offsetY - 4) / (l.h + l.pad));
    const x = Math.floor(((e.offsetX - 4) % (l.w + l.pad) - l.pad) / l.cell), y = Math.floor(((e.offsetY - 4) % (l.h + l.pad) - l.pad) / l.cell);
    if (column < 0 || column >= l.columns || row < 0 || x < 0 || x >= l.across || y < 0 || y >= l.down) return -1;
    const node = row * l.columns + column, inside = y * l.across + x, rank = node * found.node + inside;
    return node < nodes && inside < found.node && rank < found.world ? rank : -1;
  };
  canvas.addEventListener("pointermove", (e) => {
    const rank = at(e);
    const words = rank < 0 ? "" : "rank " + rank + ", node " + Math.floor(rank / found.node) + ": " + (real.map((one) => one.name + " " + coord(rank, one)).join(", ") || "alone") + (found.experts ? ", experts " + expert(rank).expert : "");
    report.tip(box, e.offsetX, e.offsetY, words);
    if (rank !== chosen) { chosen = rank; where.textContent = words || "point at a rank"; draw(); }
  });
  canvas.addEventListener("pointerleave", () => { chosen = -1; report.tip(box); draw(); });
  select.addEventListener("change", draw);
  report.redraws.push(draw);
  report.ranks = { group, at };
  draw();
})();
