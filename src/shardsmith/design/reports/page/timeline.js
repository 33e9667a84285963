"use strict";
// The timeline: every span of the step on one canvas. Where spans are narrower than pixels, a row is mixed into one
// line of pixels and laid down at once, so that 64 ranks with hundreds of microbatches move smoothly.
(() => {
  const found = report.data("timeline-data"), box = document.getElementById("timeline-box"), canvas = document.getElementById("timeline-canvas");
  const lanesOn = document.getElementById("lanes"), where = document.getElementById("where");
  const LEFT = 84, TOP = 22, GAP = 3, LANE = 5, SEEN = 0.5, FAINTEST = 1e-5; // of a column of pixels
  const decode = (text, n) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
    return { n, start: new Float32Array(bytes, 0, n), length: new Float32Array(bytes, 4 * n, n), microbatch: new Uint16Array(bytes, 8 * n, n),
      stage: new Uint16Array(bytes, 10 * n, n), kind: new Uint8Array(bytes, 12 * n, n) };
  };
  const rows = found.rows.map((row) => ({ ...row, lanes: row.lanes.map((lane) => ({ lane: lane.lane, ...decode(lane.data, lane.count) })) }));
  const has = rows.some((row) => row.lanes.length > 1), bar = Math.max(6, Math.min(26, Math.floor(560 / rows.length)));
  lanesOn.checked = has && rows.length <= 16;
  lanesOn.disabled = !has;
  const view = { from: 0, to: found.end };

  const laneList = () => lanesOn.checked ? [...new Set(rows.flatMap((row) => row.lanes.map((l) => l.lane)))].filter((l) => l !== "compute") : [];
  const rowHeight = () => bar + laneList().length * LANE + (lanesOn.checked ? 3 : 1) * GAP;
  const height = () => TOP + rows.length * rowHeight() + 4;
  const x = (t, width) => LEFT + (t - view.from) / (view.to - view.from) * (width - LEFT);
  const time = (px, width) => view.from + (px - LEFT) / (width - LEFT) * (view.to - view.from);
  // First span of a lane that ends after t: spans of a lane stand in order and do not overlap.
  const first = (lane, t) => { let low = 0, high = lane.n; while (low < high) { const m = (low + high) >> 1; lane.start[m] + lane.length[m] < t ? low = m + 1 : high = m; } return low; };
  // Colours of a lane by index: kinds in two tones (every second stage of a rank is lighter), or the lane's own one.
  const tones = [...found.kinds.flatMap((kind) => found.tones[kind])];
  rows.forEach((row) => row.lanes.forEach((lane) => {
    if (lane.lane !== "compute") { lane.colours = [found.laneTones[lane.lane]]; lane.tone = new Uint8Array(lane.n); return; }
    lane.colours = tones;
    lane.tone = lane.kind.map((kind, i) => 2 * kind + Math.max(0, row.stages.indexOf(lane.stage[i])) % 2);
  }));

  const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const number = (colour) => rgb(colour.length === 4 ? "#" + [...colour.slice(1)].map((c) => c + c).join("") : colour);

  // Spans of a lane mixed into `bins` from time `from` to `to`: red, green, blue and how much is covered, a bin.
  const mix = (lane, first, last, from, to, bins) => {
    const sums = new Float32Array(4 * bins + 4), scale = bins / (to - from), own = lane.colours.flatMap(number), { start, length, tone } = lane;
    for (let i = first; i < last; i++) {
      const a = Math.max(0, (start[i] - from) * scale), b = Math.min(bins, (start[i] + length[i] - from) * scale);
      if (b <= a) continue;
      const t = 3 * tone[i], end = Math.floor(b), red = own[t], green = own[t + 1], blue = own[t + 2];
      for (let bin = Math.floor(a), at = 4 * bin; bin <= end; bin++, at += 4) {
        const share = (b < bin + 1 ? b : bin + 1) - (a > bin ? a : bin);
        sums[at] += share * red; sums[at + 1] += share * green; sums[at + 2] += share * blue; sums[at + 3] += share;
      }
    }
    return sums;
  };
  // The same for the whole step in fine bins, summed up from the left: any stretch is then one difference.
  const BINS = 8192;
  const summed = (lane) => {
    if (lane.summed) return lane.summed;
    const sums = mix(lane, 0, lane.n, 0, found.end, BINS), total = new Float64Array(4 * BINS + 4);
    for (let at = 0; at < 4 * BINS; at++) total[at + 4] = total[at] + sums[at];
    return (lane.summed = total);
  };
  // Each column of pixels takes the mean colour of what stands in it, idle time included; of communication, which is
  // short beside compute, at least SEEN of a column is coloured where there is any.
  const mixLane = (pen, lane, top, tall, width, from, to, soft) => {
    const dots = pen.canvas.width / width, columns = Math.round((width - LEFT) * dots), ground = number(soft);
    const high = Math.max(1, Math.round(tall * dots)), image = pen.createImageData(columns, high), pixels = image.data;
    const put = (column, red, green, blue, covered) => {
      const shown = covered > FAINTEST && lane.lane !== "compute" ? Math.max(SEEN, covered) : covered, more = covered ? shown / covered : 1;
      const at = 4 * column, left = 1 - Math.min(1, shown);
      pixels[at] = more * red + left * ground[0]; pixels[at + 1] = more * green + left * ground[1]; pixels[at + 2] = more * blue + left * ground[2]; pixels[at + 3] = 255;
    };
    const bin = found.end / BINS, each = (view.to - view.from) / columns;
    if (each < bin) {
      const sums = mix(lane, from, to, view.from, view.to, columns);
      for (let c = 0; c < columns; c++) put(c, sums[4 * c], sums[4 * c + 1], sums[4 * c + 2], sums[4 * c + 3]);
    } else {
      const total = summed(lane), before = [0, 0, 0, 0], now = [0, 0, 0, 0], per = bin / each;
      for (let c = -1; c < columns; c++) {
        const place = Math.min(BINS - 1e-6, (view.from + (c + 1) * each) / bin), whole = Math.floor(place), part = place - whole;
        for (let k = 0; k < 4; k++) { const low = total[4 * whole + k]; now[k] = low + part * (total[4 * whole + 4 + k] - low); }
        if (c >= 0) put(c, (now[0] - before[0]) * per, (now[1] - before[1]) * per, (now[2] - before[2]) * per, (now[3] - before[3]) * per);
        for (let k = 0; k < 4; k++) before[k] = now[k];
      }
    }
    for (let line = 1; line < high; line++) pixels.copyWithin(4 * columns * line, 0, 4 * columns);
    pen.putImageData(image, Math.round(LEFT * dots), Math.round(top * dots));
  };

  const drawLane = (pen, lane, top, tall, width, soft) => {
    const from = first(lane, view.from), to = Math.min(lane.n, first(lane, view.to) + 1);
    if (9 * (to - from) > width - LEFT) return mixLane(pen, lane, top, tall, width, from, to, soft);
    for (let i = from; i < to; i++) {
      const a = Math.max(LEFT, x(lane.start[i], width)), right = Math.min(width, x(lane.start[i] + lane.length[i], width)), w = right - a;
      if (w <= 0) continue;
      pen.fillStyle = lane.colours[lane.tone[i]];
      pen.fillRect(a, top, Math.max(w - (w > 5 ? 0.8 : 0), 0.6), tall);
      if (lane.lane === "compute" && tall >= 11 && lane.microbatch[i] !== 65535 && w > 7 * String(lane.microbatch[i]).length + 4) {
        pen.fillStyle = lane.tone[i] % 2 || lane.tone[i] === 2 ? "#1f2430" : "#fff"; pen.font = "10px system-ui, sans-serif"; pen.textAlign = "center"; pen.textBaseline = "middle";
        pen.fillText(lane.microbatch[i], (a + right) / 2, top + tall / 2 + 0.5);
      }
    }
  };

  const ticks = (pen, width, line, faint) => {
    const span = view.to - view.from, rough = span / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    pen.font = "11px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
      const at = x(t, width);
      pen.fillStyle = line; pen.fillRect(at, TOP - 6, 1, height());
      pen.fillStyle = faint;
      if (at < width - 44) pen.fillText(report.seconds(Math.round(t / step) * step), at + 3, 9);
    }
  };

  let asked = false;
  const draw = () => { if (!asked) { asked = true; requestAnimationFrame(paint); } };
  const paint = () => {
    asked = false;
    const [pen, width] = report.sharp(canvas, height()), lanes = laneList(), each = rowHeight();
    const [line, faint, soft, paper] = ["--line", "--faint", "--soft", "--paper"].map(report.colour);
    pen.clearRect(0, 0, width, height());
    ticks(pen, width, line, faint);
    rows.forEach((row, r) => {
      const top = TOP + r * each;
      pen.fillStyle = soft; pen.fillRect(LEFT, top, width - LEFT, bar);
      row.lanes.forEach((lane) => {
        const at = lane.lane === "compute" ? 0 : lanes.indexOf(lane.lane) + 1;
        if (at === 0) drawLane(pen, lane, top, bar, width, soft);
        else if (at > 0 && lanesOn.checked) drawLane(pen, lane, top + bar + (at - 1) * LANE + 1, LANE - 1, width, paper);
      });
      if (bar >= 9 || r % Math.ceil(10 / each) === 0) {
        pen.fillStyle = faint; pen.font = Math.max(8, Math.min(11, bar)) + "px system-ui, sans-serif"; pen.textAlign = "right"; pen.textBaseline = "middle";
        pen.fillText("rank " + row.rank, LEFT - 8, top + bar / 2);
      }
    });
    where.textContent = report.seconds(view.from) + " to " + report.seconds(view.to) + " of " + report.seconds(found.end) + (found.left ? "; communication left out: too many spans" : "");
  };

  const clamp = (from, to) => {
    const least = found.end * 1e-5, span = Math.min(found.end, Math.max(least, to - from));
    view.from = Math.max(0, Math.min(from, found.end - span)); view.to = view.from + span; draw();
  };
  const zoom = (factor, at) => clamp(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const shift = (share) => { const by = (view.to - view.from) * share; clamp(view.from + by, view.to + by); };
  const middle = () => (view.from + view.to) / 2;

  canvas.addEventListener("wheel", (e) => {
    if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY * 0.002), time(e.offsetX, canvas.clientWidth)); }
    else if (e.deltaX) { e.preventDefault(); shift(e.deltaX / canvas.clientWidth); }
  }, { passive: false });
  canvas.addEventListener("dblclick", (e) => zoom(e.shiftKey ? 2.5 : 0.4, time(e.offsetX, canvas.clientWidth)));
  const fingers = new Map();
  canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); fingers.set(e.pointerId, e.offsetX); });
  ["pointerup", "pointercancel"].forEach((name) => canvas.addEventListener(name, (e) => fingers.delete(e.pointerId)));
  canvas.addEventListener("pointerleave", () => report.tip(box));
  canvas.addEventListener("pointermove", (e) => {
    const width = canvas.clientWidth;
    if (!fingers.has(e.pointerId)) return hover(e, width);
    const before = [...fingers.values()];
    if (fingers.size === 1) shift((before[0] - e.offsetX) / (width - LEFT));
    fingers.set(e.pointerId, e.offsetX);
    if (fingers.size === 2) {
      const now = [...fingers.values()], apart = Math.abs(now[0] - now[1]), was = Math.abs(before[0] - before[1]);
      if (apart > 8 && was > 8) zoom(was / apart, time((now[0] + now[1]) / 2, width));
    }
    report.tip(box);
  });
  const hover = (e, width) => {
    const row = rows[Math.floor((e.offsetY - TOP) / rowHeight())], below = (e.offsetY - TOP) % rowHeight();
    if (!row || e.offsetX < LEFT) return report.tip(box);
    const wanted = below < bar ? "compute" : laneList()[Math.floor((below - bar) / LANE)], t = time(e.offsetX, width);
    const lane = row.lanes.find((l) => l.lane === wanted), i = lane ? first(lane, t) : 0;
    if (!lane || i >= lane.n || lane.start[i] > t) return report.tip(box, e.offsetX, e.offsetY, "rank " + row.rank + ": idle at " + report.seconds(t));
    const kind = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights", other: "update" }[found.kinds[lane.kind[i]]];
    const what = lane.lane === "compute" ? kind : lane.lane + " communication";
    const of = lane.microbatch[i] === 65535 ? "" : ", microbatch " + lane.microbatch[i] + ", stage " + lane.stage[i];
    report.tip(box, e.offsetX, e.offsetY, "rank " + row.rank + ": " + what + of + ", " + report.seconds(lane.length[i]) + " from " + report.seconds(lane.start[i]));
  };
  canvas.addEventListener("keydown", (e) => {
    const act = { ArrowLeft: () => shift(-0.15), ArrowRight: () => shift(0.15), "+": () => zoom(0.7, middle()), "=": () => zoom(0.7, middle()), "-": () => zoom(1 / 0.7, middle()), 0: () => clamp(0, found.end) }[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () =>
    ({ in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), all: () => clamp(0, found.end) })[button.dataset.zoom]()));
  lanesOn.addEventListener("change", draw);

  const words = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights", other: "update" };
  const legend = document.getElementById("timeline-legend"), used = new Set();
  rows.forEach((row) => row.lanes.forEach((lane) => { if (lane.lane === "compute") lane.kind.forEach((k) => used.add(found.kinds[k])); else used.add(lane.lane); }));
  const entries = [...found.kinds.filter((k) => used.has(k)).map((k) => [found.tones[k][0], words[k]]), ...Object.keys(found.laneTones).filter((l) => used.has(l)).map((l) => [found.laneTones[l], l + " communication"])];
  if (rows.some((row) => row.stages.length > 1)) entries.push([found.tones.F[1], "light: every second stage of a rank"]);
  entries.forEach(([colour, text]) => { const item = document.createElement("span"), key = document.createElement("i"); item.className = "item"; key.className = "key"; key.style.background = colour; item.append(key, text); legend.append(item); });
  report.redraws.push(draw);
  report.timeline = { view, clamp, paint, rows: rows.length };
  paint();
})();
