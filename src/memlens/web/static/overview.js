// The map of all memories on a canvas, and the charts of the experiments.
import { ask, debounced, here, html, library } from "./base.js";

const section = document.querySelector(".map");
const holder = section.querySelector(".map-holder");
const canvas = section.querySelector("canvas");
const cursor = section.querySelector(".cursor");
const now = section.querySelector(".now");
const choice = section.querySelector("#by");
const sorting = section.querySelector("#sort");
const NOTHING = 255;
const GUTTER = 30; // width of the column of layer numbers
const GAP = 6; // space between layers
let map = null;
let place = null; // the selected cell: { row, cell }

// Colors

function readColor(name) {
  // a canvas cannot use CSS variables, so read the computed color
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  section.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return [red, green, blue];
}

function palette(kinds) {
  const colors = new Uint32Array(256);
  const set = (level, [red, green, blue]) => (colors[level] = (255 << 24) | (blue << 16) | (green << 8) | red);
  if (kinds.length) kinds.forEach((_, kind) => set(kind, readColor(kindColor(kind, kinds.length))));
  else {
    const stops = [0, 1, 2, 3, 4].map((stop) => readColor(`ramp-${stop}`));
    for (let level = 0; level < NOTHING; level++) {
      const at = (level / (NOTHING - 1)) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      set(level, stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low))));
    }
  }
  set(NOTHING, readColor("none"));
  return colors;
}

const kindColor = (kind, count) => (count > 4 && kind ? `role-${kind}` : count === 2 && kind === 1 ? "c2" : count === 3 && kind ? ["", "ramp-1", "c2"][kind] : `kind-${kind}`);

// Layout: each layer is a band of several lines, filled column by column

function layout(width, layers) {
  const most = Math.max(...layers.map((layer) => layer.memories));
  const wide = width - GUTTER;
  const perLayer = Math.min(64, Math.max(14, Math.floor(620 / layers.length)));
  const side = Math.max(3, Math.min(12, Math.floor(Math.sqrt((wide * perLayer) / most))));
  const columns = Math.max(1, Math.floor(wide / side));
  const fitting = columns * Math.max(1, Math.floor(perLayer / side));
  const room = Math.ceil(most / Math.ceil(most / fitting)); // the number of cells if all have the same size
  const lines = Math.ceil(room / columns);
  return { side, lines, room, band: lines * side + GAP };
}

const cellsOf = (layer) => Math.ceil(layer.memories / layer.size);

function draw() {
  const { side, lines, band } = map.shape;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = canvas.parentElement.clientWidth;
  const height = map.layers.length * band;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const picture = canvas.getContext("2d");
  const colors = palette(map.kinds);
  const image = picture.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const size = Math.round(side * ratio);
  const inner = size > 4 * ratio ? size - Math.round(ratio) : size;
  map.layers.forEach((layer, row) => {
    const top = Math.round(row * band * ratio);
    for (let cell = 0; cell < cellsOf(layer); cell++) {
      const left = Math.round(GUTTER * ratio) + Math.floor(cell / lines) * size;
      const from = top + (cell % lines) * size;
      const shade = colors[map.levels[map.starts[row] + cell]];
      for (let y = from; y < from + inner; y++) pixels.fill(shade, y * canvas.width + left, y * canvas.width + left + inner);
    }
  });
  picture.putImageData(image, 0, 0);
  picture.scale(ratio, ratio);
  picture.font = "11px system-ui, sans-serif";
  picture.textAlign = "right";
  picture.textBaseline = "middle";
  picture.fillStyle = `rgb(${readColor("soft").join(" ")})`;
  map.layers.forEach((layer, row) => picture.fillText(layer.layer, GUTTER - 8, row * band + (band - GAP) / 2));
}

// Cells

function cellAt(x, y) {
  const { side, lines, band } = map.shape;
  const row = Math.floor(y / band);
  const line = Math.floor((y - row * band) / side);
  const cell = Math.floor((x - GUTTER) / side) * lines + line;
  if (x < GUTTER || line >= lines || !map.layers[row] || cell >= cellsOf(map.layers[row])) return null;
  return { row, cell };
}

// Returns the name of a memory, like MemoryNames.name in memory.py: dense memories first, then shared, then routed.
function nameOf(layer, number) {
  const before = { shared: 0, routed: 0 };
  for (const { kind, count, size } of layer.groups) {
    if (number < count * size) {
      const owner = kind === "dense" ? "" : `${kind === "shared" ? "S" : "E"}${before[kind] + Math.floor(number / size)}`;
      return `L${layer.layer}${owner}N${number % size}`;
    }
    number -= count * size;
    before[kind] += count;
  }
}

function memoryOf({ row, cell }) {
  const layer = map.layers[row];
  return nameOf(layer, map.memories ? map.memories[map.starts[row] + cell] : cell);
}

const written = (value) => (map.percent ? `${(100 * value).toPrecision(3)}%` : value.toPrecision(4));

function valueOf(level) {
  if (level === NOTHING) return "no value";
  if (map.kinds.length) return map.kinds[level];
  const at = (level / (NOTHING - 1)) * (map.quantiles.length - 1);
  const low = Math.min(Math.floor(at), map.quantiles.length - 2);
  return `about ${written(map.quantiles[low] + (map.quantiles[low + 1] - map.quantiles[low]) * (at - low))}`;
}

function say(name, value, summary) {
  now.replaceChildren(html("b", { textContent: name }), ` · ${map.label}: ${value}`);
  if (summary) now.append(document.createElement("br"), html("bdi", { textContent: summary }));
}

const sayMore = debounced(async (name, value) => {
  const { value: exact, summary } = await ask(`/api/brief/${name}?by=${map.by}`).catch(() => ({}));
  if (place && memoryOf(place) === name) say(name, exact == null ? value : written(exact), summary);
}, 120);

function goTo(next) {
  place = next;
  cursor.hidden = !next;
  if (!next) return;
  const { side, lines, band } = map.shape;
  const layer = map.layers[next.row];
  Object.assign(cursor.style, {
    left: `${GUTTER + Math.floor(next.cell / lines) * side - 2}px`,
    top: `${next.row * band + (next.cell % lines) * side - 2}px`,
    width: `${side + 4}px`,
    height: `${side + 4}px`,
  });
  const name = memoryOf(next);
  const value = valueOf(map.levels[map.starts[next.row] + next.cell]) + (layer.size > 1 ? `, the highest of ${layer.size} memories` : "");
  say(name, value);
  sayMore(name, value);
}

function move(key) {
  const { lines } = map.shape;
  let { row, cell } = place ?? { row: 0, cell: 0 };
  if (place) {
    const last = cellsOf(map.layers[row]) - 1;
    const line = cell % lines;
    if (key === "ArrowLeft") cell = Math.max(cell - lines, line);
    if (key === "ArrowRight") cell = Math.min(cell + lines, last);
    if (key === "ArrowUp") [row, cell] = line > 0 ? [row, cell - 1] : [row - 1, cell + lines - 1];
    if (key === "ArrowDown") [row, cell] = line < lines - 1 && cell < last ? [row, cell + 1] : [row + 1, cell - line];
    if (key === "PageUp") row -= 1;
    if (key === "PageDown") row += 1;
    if (key === "Home") cell = 0;
    if (key === "End") cell = last;
    row = Math.max(0, Math.min(row, map.layers.length - 1));
    cell = Math.max(0, Math.min(cell, cellsOf(map.layers[row]) - 1));
  }
  goTo({ row, cell });
}

const open = () => place && window.location.assign(here(`/m/${memoryOf(place)}`));
const atPointer = (event) => {
  const box = canvas.getBoundingClientRect();
  return cellAt(event.clientX - box.left, event.clientY - box.top);
};
canvas.addEventListener("pointermove", (event) => map && goTo(atPointer(event)));
canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && goTo(null));
canvas.addEventListener("click", (event) => {
  if (!map) return;
  goTo(atPointer(event));
  open();
});
canvas.addEventListener("keydown", (event) => {
  if (!map || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter") open();
  else if (/^(Arrow|Page|Home|End)/.test(event.key)) {
    event.preventDefault();
    move(event.key);
  }
});

// Loading

const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

function showLegend() {
  const legend = section.querySelector(".legend");
  if (map.kinds.length) {
    legend.replaceChildren(
      ...map.kinds.map((label, kind) => {
        const part = html("span", { className: "kind", textContent: label });
        part.style.setProperty("--kind", `var(--${kindColor(kind, map.kinds.length)})`);
        return part;
      }),
    );
    return;
  }
  const ramp = html("span", { className: "ramp" });
  ramp.style.background = `linear-gradient(90deg, ${[0, 1, 2, 3, 4].map((stop) => `var(--ramp-${stop})`).join(", ")})`;
  const middle = map.quantiles[(map.quantiles.length - 1) / 2];
  legend.replaceChildren(written(map.quantiles[0]), ramp, `${written(map.quantiles.at(-1))} (colors show ranks; the median is ${written(middle)})`);
}

const ORDERS = {
  level: " Each layer is sorted by color.",
  class: " Each layer is sorted by kind of pattern.",
  role: " Each layer is sorted by role.",
  likeness: " Memories with shared triggers and promoted tokens are neighbors.",
};

async function showMap() {
  holder.hidden = false;
  const { layers } = map ?? (await ask("/api/map?room=1"));
  const shape = layout(canvas.parentElement.clientWidth, layers);
  const answer = await ask(`/api/map?by=${choice.value}&room=${shape.room}&sort=${sorting.value}`);
  const starts = [0];
  for (const layer of answer.layers) starts.push(starts.at(-1) + cellsOf(layer));
  const memories = answer.memories && new Uint32Array(bytes(answer.memories).buffer);
  map = { ...answer, shape, starts, levels: bytes(answer.levels), memories };
  const size = Math.max(...answer.layers.map((layer) => layer.size));
  const cell = size > 1 ? `each cell shows the highest of ${size} memories` : "one cell per memory";
  section.querySelector(".explanation").textContent = `One row per layer, ${cell}. Color: ${answer.meaning}.${ORDERS[answer.sort] ?? ""}`;
  goTo(null);
  draw();
  showLegend();
  section.dataset.drawn = choice.value;
  section.dataset.sorted = sorting.value;
}

function complain(error) {
  holder.hidden = false;
  section.querySelector(".explanation").textContent = error.message;
}

function choose() {
  const sorted = sorting.value === "place" ? "" : `&sort=${sorting.value}`;
  history.replaceState(null, "", here(`/?by=${choice.value}${sorted}`));
  showMap().catch(complain);
}
choice.addEventListener("change", choose);
sorting.addEventListener("change", choose);
new ResizeObserver(debounced(() => map && Math.abs(canvas.width / Math.min(window.devicePixelRatio || 1, 2) - canvas.parentElement.clientWidth) > 1 && showMap().catch(complain))).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map && draw());
showMap().catch(complain);

// Charts: loaded when they are near the screen

const OPTIONS = { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true } };

function article(one) {
  const made = document.createElement("article");
  const title = html("h3", { textContent: one.title });
  if (one.figure) title.append(html("small", { textContent: one.figure }));
  made.append(title, html("p", { className: "lead", textContent: one.lead }));
  for (const chart of one.charts) {
    const place = html("div", { className: "chart" });
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", chart.alt);
    made.append(place);
  }
  return made;
}

async function showCharts(charts) {
  const wait = charts.querySelector(".charts-wait");
  wait.textContent = "Drawing the charts …";
  try {
    const [sections] = await Promise.all([ask("/api/charts"), library("vega.js")]);
    const made = sections.map(article);
    charts.replaceChildren(wait, ...made);
    for (const [number, one] of sections.entries()) {
      const places = made[number].querySelectorAll(".chart");
      for (const [which, chart] of one.charts.entries()) {
        await window.vegaEmbed(places[which], chart.spec, OPTIONS);
        places[which].classList.add("drawn");
      }
    }
    wait.remove();
  } catch (error) {
    charts.replaceChildren(wait);
    wait.textContent = `Cannot draw the charts: ${error.message}`;
  }
  charts.dataset.charts = "drawn";
}

const charts = document.querySelector("[data-charts=ask]");
if (charts) {
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    showCharts(charts);
  }, { rootMargin: globalThis.memlensSite ? "0px" : "600px" });
  seen.observe(charts);
}
