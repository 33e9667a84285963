"use strict";
// What both canvases share: theme, seconds in words, a canvas as sharp as the screen, and tables that sort.
const report = (() => {
  const root = document.documentElement, redraws = [];
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const redraw = () => redraws.forEach((draw) => draw());
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const seconds = (s) => {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (Math.abs(s) >= size) return +(s / size).toPrecision(4) + " " + unit;
    return s ? +(s * 1e9).toPrecision(4) + " ns" : "0 s";
  };
  const data = (id) => JSON.parse(document.getElementById(id).textContent);
  const sharp = (canvas, height) => {
    const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); canvas.style.height = height + "px";
    }
    const pen = canvas.getContext("2d", { willReadFrequently: true }); // pixels are laid down by hand
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return [pen, width];
  };
  const tip = (box, x, y, words) => {
    const at = box.querySelector(".tip");
    at.hidden = !words;
    if (!words) return;
    at.textContent = words;
    at.style.left = Math.max(0, Math.min(x + 12, box.clientWidth - at.offsetWidth - 4)) + "px";
    at.style.top = Math.max(0, Math.min(y + 14, box.clientHeight - at.offsetHeight - 4)) + "px";
  };

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => { const cell = row.cells[column], n = parseFloat(cell.dataset.value ?? cell.textContent); return isNaN(n) ? cell.textContent : n; };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0) * (down ? -1 : 1));
      table.tBodies[0].append(...rows);
    }));
  });
  return { dark, colour, seconds, data, sharp, tip, redraws };
})();
