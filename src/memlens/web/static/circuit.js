// The page Circuit: draws the graph, follows pointer and keyboard, groups nodes. The address holds everything.
import { announce, ask, debounced, here, html } from "./base.js";

const part = (id) => document.getElementById(id);
const svg = part("graph");
const form = document.querySelector("form.ask");
const ROW = 22; // height of a node in its cell
const EDGES = 14; // maximum number of edges to draw at a node, strongest first
const LISTED = 8; // maximum number of edges to list at a node, strongest first

let graph = null; // the server's answer
let view = null; // drawn nodes and edges, after hiding and collapsing
let hovered = null;
const state = { shown: 40, focus: null, groups: [], chosen: new Set() };

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const tokenText = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵") || "∅";
const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`;
const share = (value) => (graph.target.value ? `${value < 0 ? "−" : "+"}${((100 * Math.abs(value)) / Math.abs(graph.target.value)).toFixed(1)}%` : signed(value));
const rowOf = (node) => (node.position === undefined ? graph.tokens.length - 1 : node.position + graph.shift);
const place = (node) => (node.kind === "memory" ? `${node.name} at ${tokenText(graph.tokens[rowOf(node)])}` : node.kind === "embedding" ? tokenText(node.name) : node.kind === "target" ? `${tokenText(node.name)} (target)` : node.name);

// The address

function readAddress() {
  const query = new URLSearchParams(location.search);
  state.shown = Number(query.get("shown")) || Infinity;
  state.focus = query.get("focus");
  state.groups = query.getAll("group").map((text) => {
    const [ids, ...name] = text.replace(/^-/, "").split("|");
    return { ids: ids.split(","), name: name.join("|") || "group", collapsed: text.startsWith("-") };
  });
  if (form.elements.file && query.get("file")) form.elements.file.value = query.get("file");
}

function asked() {
  const query = new URLSearchParams(location.search);
  const kept = new URLSearchParams();
  for (const name of ["prompt", "token", "against", "nodes", "file"]) if (query.get(name)) kept.set(name, query.get(name));
  if (form.elements.file) kept.set("file", form.elements.file.value);
  return kept;
}

const groupText = (group) => `${group.collapsed ? "-" : ""}${group.ids.join(",")}|${group.name}`;

function writeAddress() {
  const query = asked();
  const most = graph.nodes.filter((node) => node.kind === "memory").length;
  if (state.shown < most) query.set("shown", state.shown);
  if (state.focus) query.set("focus", state.focus);
  for (const group of state.groups) query.append("group", groupText(group));
  history.replaceState(null, "", `?${query}`);
  const saved = asked();
  for (const group of state.groups) saved.append("group", groupText(group));
  part("download")?.setAttribute("href", `/api/circuit/graph?${saved}`);
}
const writeSoon = debounced(writeAddress, 200); // browsers limit how often an address changes

// Hidden memories join the other memories of their layer, and members of a collapsed group become one node. Edges are
// added up, so all sums still hold.

function visible() {
  const memories = graph.nodes.filter((node) => node.kind === "memory").sort((one, other) => Math.abs(other.relevance) - Math.abs(one.relevance));
  const hidden = new Set(memories.slice(state.shown).map((node) => node.id));
  const merged = new Map(memories.filter((node) => hidden.has(node.id)).map((node) => [node.id, `others${node.layer}`]));
  const nodes = new Map(graph.nodes.filter((node) => !hidden.has(node.id)).map((node) => [node.id, node]));
  state.groups.forEach((group, number) => {
    const members = group.ids.map((id) => nodes.get(id)).filter((node) => node?.kind === "memory" || node?.kind === "embedding");
    if (!group.collapsed || members.length < 2) return;
    const lead = members.reduce((best, node) => (Math.abs(node.relevance) > Math.abs(best.relevance) ? node : best));
    const id = `group${number}`;
    for (const node of members) merged.set(node.id, id), nodes.delete(node.id);
    nodes.set(id, { ...lead, id, kind: "group", name: group.name, label: "", members });
  });
  const edges = new Map();
  for (const edge of graph.edges) {
    const [source, target] = [merged.get(edge.source) ?? edge.source, merged.get(edge.target) ?? edge.target];
    if (source === target) continue;
    const key = `${source} ${target}`;
    edges.set(key, { source, target, weight: (edges.get(key)?.weight ?? 0) + edge.weight });
  }
  const into = new Map([...nodes.keys()].map((id) => [id, []]));
  const outOf = new Map([...nodes.keys()].map((id) => [id, []]));
  for (const edge of edges.values()) into.get(edge.target)?.push(edge), outOf.get(edge.source)?.push(edge);
  for (const list of [...into.values(), ...outOf.values()]) list.sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight));
  for (const [id, node] of nodes) {
    if (node.kind === "group") nodes.set(id, { ...node, relevance: outOf.get(id).reduce((sum, edge) => sum + edge.weight, 0) });
  }
  return { nodes, into, outOf };
}

// The drawing: layers from bottom to top, tokens from left to right

function layOut() {
  const drawn = [...view.nodes.values()].filter((node) => !["others", "bias"].includes(node.kind));
  const layers = [...new Set(drawn.filter((node) => node.layer !== undefined).map((node) => node.layer))].sort((one, other) => one - other);
  const levelOf = (node) => (node.kind === "target" ? layers.length + 1 : node.layer === undefined ? 0 : 1 + layers.indexOf(node.layer));
  const cells = new Map();
  for (const node of drawn) {
    const key = `${levelOf(node)} ${rowOf(node)}`;
    cells.set(key, [...(cells.get(key) ?? []), node]);
  }
  const labelOf = (node) => ({ name: ["embedding", "target"].includes(node.kind) ? short(tokenText(node.name), 14) : short(node.name, 18), known: node.label ? short(node.label, 16) : "" });
  const wide = (node) => (node.kind === "embedding" ? 8 * labelOf(node).name.length + 16 : 50 + 7.4 * labelOf(node).name.length + 6.4 * labelOf(node).known.length);
  const widths = graph.tokens.map((_, row) => Math.max(46, ...drawn.filter((node) => rowOf(node) === row).map((node) => Math.min(240, wide(node)))));
  const left = 62;
  const starts = widths.map((_, row) => left + widths.slice(0, row).reduce((sum, one) => sum + one, 0));
  const heights = [...Array(layers.length + 2).keys()].map((level) => 14 + (level ? ROW * Math.max(1, ...widths.map((_, row) => cells.get(`${level} ${row}`)?.length ?? 0)) : 38));
  const total = heights.reduce((sum, one) => sum + one, 0);
  const bottoms = heights.map((_, level) => total - heights.slice(0, level).reduce((sum, one) => sum + one, 0));
  const places = new Map();
  for (const [key, nodes] of cells) {
    const [level, row] = key.split(" ").map(Number);
    nodes.sort((one, other) => Math.abs(other.relevance) - Math.abs(one.relevance));
    nodes.forEach((node, number) => {
      const x = level ? starts[row] + 34 : starts[row] + widths[row] / 2;
      const y = level ? bottoms[level] - heights[level] + 7 + ROW * (number + 0.5) : bottoms[0] - 36;
      places.set(node.id, { x, y, node, ...labelOf(node) });
    });
  }
  return { layers, heights, bottoms, starts, widths, places, width: left + widths.reduce((sum, one) => sum + one, 0) + 24, total };
}

let layout = null;

function draw() {
  view = visible();
  layout = layOut();
  const { layers, heights, bottoms, starts, widths, places, width, total } = layout;
  svg.replaceChildren();
  for (const [name, value] of [["viewBox", `0 0 ${width} ${total}`], ["width", width], ["height", total]]) svg.setAttribute(name, value);
  heights.forEach((height, level) => {
    if (level % 2) svg.append(make("rect", { class: "band", x: 0, y: bottoms[level] - height, width, height }));
  });
  const label = (textContent, style) => html("span", { textContent, style });
  part("layers").replaceChildren(
    ...heights.slice(1).map((height, index) => label(index === layers.length ? "target" : `layer ${layers[index]}`, `top:${bottoms[index + 1] - height / 2}px`)),
  );
  part("tokens").replaceChildren(
    ...graph.tokens.map((token, row) => label(short(tokenText(token), 14), `left:${starts[row] + widths[row] / 2}px`)),
  );
  svg.append(make("g", { id: "edges" }));
  const largest = Math.max(1e-30, ...[...places.values()].filter(({ node }) => node.kind !== "target").map(({ node }) => Math.abs(node.relevance)));
  const inOrder = [...places.values()].sort((one, other) => other.y - one.y || one.x - other.x);
  const current = places.has(state.focus) ? state.focus : inOrder[0].node.id;
  for (const { x, y, node, name, known } of inOrder) svg.append(drawNode(x, y, node, name, known, largest, node.id === current));
  showActive();
}

function drawNode(x, y, node, name, known, largest, isCurrent) {
  const size = node.kind === "target" ? 9 : 2.5 + 7 * Math.sqrt(Math.abs(node.relevance) / largest);
  const sign = node.relevance < 0 ? "down" : "up";
  const label = `${place(node)}, relevance ${share(node.relevance)}${node.label ? `, ${node.label}` : ""}`;
  const element = make("g", { class: "node", "data-id": node.id, tabindex: isCurrent ? 0 : -1, role: "button", "aria-label": label });
  element.append(make("title", {}, label));
  // a larger invisible circle is easier to hit
  element.append(make("circle", { class: "ring", cx: x, cy: y, r: 12, "pointer-events": "all" }));
  const shape = node.kind === "group" ? make("rect", { class: sign, x: x - size, y: y - size, width: 2 * size, height: 2 * size, rx: 3 }) : make("circle", { class: sign, cx: x, cy: y, r: size });
  element.append(shape);
  if (node.kind !== "embedding") {
    const text = make("text", { x: x + 14, y: y + 4 }, name);
    if (node.kind === "target") text.setAttribute("class", "token-text");
    if (known) text.append(make("tspan", { class: "known", dx: 5 }, known));
    element.append(text);
  }
  return element;
}

/** Draws the edges of the node under the pointer or of the selected node, else the strongest edge into every node. */
function showActive() {
  // a node that was just hidden or put into a collapsed group is no longer drawn
  const active = [hovered, state.focus].find((id) => layout.places.has(id)) ?? null;
  const near = active ? [...view.into.get(active), ...view.outOf.get(active)] : [...layout.places.keys()].flatMap((id) => view.into.get(id).filter((edge) => layout.places.has(edge.source)).slice(0, 1));
  const drawn = near.filter((edge) => layout.places.has(edge.source) && layout.places.has(edge.target)).sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight));
  const edges = active ? drawn.slice(0, 2 * EDGES) : drawn;
  const largest = Math.max(1e-30, ...edges.map((edge) => Math.abs(edge.weight)));
  part("edges").replaceChildren(
    ...edges.map((edge) => {
      const [from, to] = [layout.places.get(edge.source), layout.places.get(edge.target)];
      const [bend, side] = [(to.y - from.y) / 2, from.x === to.x ? 8 + Math.min(26, Math.abs(to.y - from.y) / 8) : 0]; // beside the nodes in between
      const path = `M${from.x} ${from.y}C${from.x - side} ${from.y + bend} ${to.x - side} ${to.y - bend} ${to.x} ${to.y}`;
      return make("path", { class: `edge ${edge.weight < 0 ? "down" : "up"}${active ? "" : " backbone"}`, d: path, "stroke-width": (0.6 + 5 * (Math.abs(edge.weight) / largest)).toFixed(2) });
    }),
  );
  const linked = new Set([active, ...edges.flatMap((edge) => [edge.source, edge.target])]);
  for (const element of svg.querySelectorAll(".node")) {
    const id = element.dataset.id;
    element.classList.toggle("faded", active !== null && !linked.has(id));
    element.classList.toggle("focus", id === state.focus);
    element.classList.toggle("chosen", state.chosen.has(id));
    element.setAttribute("aria-pressed", String(id === state.focus));
  }
}

// Details and groups

function steer(nodes) {
  const names = [...new Set(nodes.flatMap((node) => (node.members ?? [node]).filter((one) => one.kind === "memory").map((one) => one.name)))];
  const query = new URLSearchParams([["prompt", graph.prompt], ...names.slice(0, 20).map((name) => ["set", `${name}=0`])]);
  return names.length ? `/steer?${query}` : null;
}

function listEdges(title, edges, end) {
  const items = edges.slice(0, LISTED).map((edge) => {
    const node = view.nodes.get(edge[end]);
    const isDrawn = layout.places.has(node.id);
    const name = isDrawn ? html("button", { type: "button", textContent: place(node) }) : html("span", { textContent: node.name });
    if (isDrawn) name.dataset.id = node.id;
    return html("li", {}, name, html("span", { className: edge.weight < 0 ? "n minus" : "n", textContent: share(edge.weight) }));
  });
  const rest = edges.slice(LISTED);
  const sum = (list) => list.reduce((total, edge) => total + edge.weight, 0);
  const line = (text, list, className = "") => html("li", { className }, html("span", { textContent: text }), html("span", { className: "n", textContent: share(sum(list)) }));
  if (rest.length) items.push(line(`${rest.length} more`, rest));
  if (edges.length) items.push(line("sum", edges, "sum"));
  return html("div", {}, html("h4", { textContent: title }), edges.length ? html("ol", {}, ...items) : html("p", { className: "quiet", textContent: "none" }));
}

function showDetails() {
  const box = part("details");
  const node = view.nodes.get(state.focus);
  if (!node) {
    box.replaceChildren(html("h3", { textContent: "Node" }), html("p", { className: "quiet", textContent: "Click a node to see the sources and targets of its relevance. Both sums are equal." }));
    return;
  }
  const name = node.kind === "memory" ? html("a", { className: "memory", href: here(`/m/${node.name}`), textContent: node.name }) : html("span", { textContent: place(node) });
  const heading = html("h3", {}, name, node.kind === "memory" ? ` at ${tokenText(graph.tokens[rowOf(node)])}` : "");
  const facts = [`relevance ${signed(node.relevance)} (${share(node.relevance)} of the target)`];
  if (node.coefficient !== undefined && node.kind === "memory") facts.push(`coefficient ${signed(node.coefficient)}`);
  if (node.label) facts.push(node.label);
  if (node.members) facts.push(node.members.map(place).join(", "));
  const actions = html("p", { className: "actions" });
  if (node.kind === "memory") actions.append(html("a", { className: "button", href: here(`/m/${node.name}`), textContent: `Open ${node.name}` }));
  const silence = globalThis.memlensSite ? null : steer([node]);
  if (silence) actions.append(html("a", { className: "button", href: silence, textContent: node.members ? "Silence these in Steer" : "Silence in Steer" }));
  if (["memory", "embedding"].includes(node.kind)) actions.append(html("button", { type: "button", id: "choose", textContent: state.chosen.has(node.id) ? "Remove from selection" : "Select for a group" }));
  const ends = html("div", { className: "ends" }, listEdges("from", view.into.get(node.id), "source"), listEdges("to", view.outOf.get(node.id), "target"));
  box.replaceChildren(heading, html("p", { className: "quiet", textContent: facts.join(" · ") }), ends, actions);
}

function showGroups() {
  const chosen = [...state.chosen].map((id) => view.nodes.get(id)).filter(Boolean);
  part("chosen").textContent = chosen.length ? `Selected: ${chosen.map(place).join(", ")}` : "Select nodes with Space or Shift-click to put them into a group.";
  const row = document.querySelector("#make-group .row");
  row.hidden = !chosen.length;
  row.querySelector("button:not([type])").disabled = chosen.length < 2;
  const link = row.querySelector(".silence");
  if (link) Object.assign(link, { href: steer(chosen) ?? "", hidden: !steer(chosen) });
  part("group-list").replaceChildren(
    ...state.groups.map((group, number) => {
      const members = group.ids.map((id) => graph.nodes.find((node) => node.id === id)).filter(Boolean);
      const name = html("input", { value: group.name, maxLength: 60 });
      name.setAttribute("aria-label", "Name of the group");
      name.addEventListener("change", () => change(() => (group.name = name.value.replaceAll("|", "/") || "group")));
      const collapse = html("button", { type: "button", textContent: group.collapsed ? "Expand" : "Collapse" });
      collapse.addEventListener("click", () => change(() => (group.collapsed = !group.collapsed)));
      const remove = html("button", { type: "button", textContent: "Remove" });
      remove.addEventListener("click", () => change(() => state.groups.splice(number, 1)));
      const line = html("li", {}, name, collapse, remove);
      const silence = globalThis.memlensSite ? null : steer(members);
      if (silence) line.append(html("a", { className: "button", href: silence, textContent: "Silence these" }));
      line.append(html("span", { className: "members", textContent: members.map(place).join(", ") }));
      return line;
    }),
  );
}

function change(edit) {
  edit();
  draw();
  showDetails();
  showGroups();
  writeSoon();
}

function focusOn(id) {
  change(() => (state.focus = state.focus === id ? null : id));
  svg.querySelector(`.node[data-id="${CSS.escape(id)}"]`)?.focus();
}

const choose = (id) => change(() => (state.chosen.has(id) ? state.chosen.delete(id) : ["memory", "embedding"].includes(view.nodes.get(id).kind) && state.chosen.add(id)));

// Pointer and keyboard

const nodeOf = (event) => event.target.closest?.(".node")?.dataset.id ?? null;

svg.addEventListener("pointerover", (event) => {
  if (event.pointerType === "touch" || hovered === nodeOf(event)) return;
  hovered = nodeOf(event);
  showActive();
});
svg.addEventListener("pointerleave", () => ((hovered = null), graph && showActive()));
svg.addEventListener("click", (event) => {
  const id = nodeOf(event);
  hovered = null;
  if (!id) return state.focus && change(() => (state.focus = null));
  if (event.shiftKey) choose(id);
  else focusOn(id);
});
svg.addEventListener("focusin", (event) => {
  hovered = event.target.matches(":focus-visible") ? nodeOf(event) : null;
  showActive();
});
svg.addEventListener("focusout", () => ((hovered = null), graph && showActive()));

const STEPS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

svg.addEventListener("keydown", (event) => {
  const id = nodeOf(event);
  if (!id || event.ctrlKey || event.metaKey || event.altKey) return;
  const step = STEPS[event.key];
  if (!step && !["Enter", " ", "Escape"].includes(event.key)) return;
  event.preventDefault();
  if (event.key === "Enter") return focusOn(id);
  if (event.key === "Escape") return change(() => ((state.focus = null), state.chosen.clear()));
  if (event.key === " ") {
    choose(id);
    return svg.querySelector(`.node[data-id="${CSS.escape(id)}"]`).focus();
  }
  const from = layout.places.get(id);
  let [best, least] = [null, Infinity];
  for (const [other, { x, y }] of layout.places) {
    const [along, across] = step[0] ? [(x - from.x) * step[0], Math.abs(y - from.y)] : [(y - from.y) * step[1], Math.abs(x - from.x)];
    const cost = along + (step[0] ? 6 : 0.5) * across;
    if (along > 1 && cost < least) [best, least] = [other, cost];
  }
  if (!best) return;
  svg.querySelector(`.node[data-id="${CSS.escape(id)}"]`).tabIndex = -1;
  const next = svg.querySelector(`.node[data-id="${CSS.escape(best)}"]`);
  next.tabIndex = 0;
  next.focus();
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
});

part("details").addEventListener("click", (event) => {
  if (event.target.id === "choose") return choose(state.focus);
  if (event.target.dataset.id) focusOn(event.target.dataset.id);
});
part("make-group").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.chosen.size < 2) return;
  const name = event.target.elements.name;
  change(() => {
    state.groups.push({ ids: [...state.chosen], name: name.value.replaceAll("|", "/") || `group ${state.groups.length + 1}`, collapsed: true });
    state.chosen.clear();
    name.value = "";
  });
  announce("group created");
});
part("clear").addEventListener("click", () => change(() => state.chosen.clear()));
part("shown").addEventListener("input", (event) => {
  part("shown-count").textContent = event.target.value;
  change(() => (state.shown = Number(event.target.value)));
});
form.elements.file?.addEventListener("change", () => (location.search = `?file=${form.elements.file.value}`));
part("prompt")?.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});

async function begin() {
  readAddress();
  const query = asked();
  const isAsked = query.has("file") || query.has("prompt");
  if (document.querySelector(".circuit-page").dataset.ready !== "yes" || !isAsked) return;
  part("busy").hidden = false;
  try {
    graph = await ask(`/api/circuit?${query}`);
  } catch (error) {
    Object.assign(part("problem"), { hidden: false, textContent: error.message });
    return;
  } finally {
    part("busy").hidden = true;
  }
  const memories = graph.nodes.filter((node) => node.kind === "memory").length;
  state.shown = Math.min(Math.max(1, state.shown), memories);
  Object.assign(part("shown"), { max: memories, value: state.shown });
  part("shown-count").textContent = state.shown;
  const { token, against, value } = graph.target;
  part("target-title").replaceChildren(html("span", { className: "token", textContent: tokenText(token) }), against ? " rather than " : "", ...(against ? [html("span", { className: "token", textContent: tokenText(against) })] : []), ` after “${short(graph.prompt, 60)}”`);
  const sum = (kind) => graph.nodes.filter((node) => node.kind === kind).reduce((total, node) => total + node.relevance, 0);
  part("parts").textContent = `${against ? "logit difference" : "logit"} ${signed(value)} = tokens ${signed(sum("embedding"))} and biases ${signed(sum("bias"))}. Memories are on the way from tokens to the target.`;
  part("result").hidden = false;
  change(() => {});
  const frame = svg.parentElement;
  frame.scrollTo(frame.scrollWidth, 0); // show the target, which is at the right
}

if (document.querySelector(".waiting")) document.addEventListener("memlens:model", () => location.reload());
begin();
