// The page Steer: sets of edits and continuations token by token. The address holds everything.
import { announce, ask, debounced, html, tokenBars } from "./base.js";

const form = document.querySelector("form.steer");
const columns = [...document.querySelectorAll(".column")];
const template = document.getElementById("edit");
const [original] = columns;
const LIMITS = { x: [-4, 8], "=": [-10, 10] };
const EDIT = /^(!?)\s*([a-z0-9]+)\s*(?:=\s*(x?)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))?\s*$/i;

// An edit as text: L3N5=x2 scales, =3.5 sets, =0 silences. A disabled edit starts with !.

function textOf(line) {
  if (line.dataset.unread !== undefined) return line.dataset.unread;
  const [name, kind, amount] = [line.querySelector(".memory").textContent, line.querySelector("select").value, line.querySelector("[type=number]").value];
  return `${name}=${kind === "0" ? "0" : kind === "x" ? `x${amount}` : amount}`;
}

const isOn = (line) => line.querySelector("[type=checkbox]").checked;
/** Returns the enabled edits, the last one of each memory. */
function editsOf(column) {
  const edits = [...column.querySelectorAll(".edits li")].filter(isOn).map(textOf);
  return [...new Map(edits.map((edit) => [edit.split("=")[0], edit])).values()];
}

function addEdit(column, text) {
  if (!text.trim()) return;
  const line = template.content.firstElementChild.cloneNode(true);
  const link = line.querySelector(".memory");
  column.querySelector(".edits").append(line);
  const [, off, name, times, amount] = EDIT.exec(text) ?? [];
  if (name === undefined) {
    // show the edit as written; the server reports the error
    Object.assign(line.dataset, { unread: text });
    link.textContent = text;
    for (const field of line.querySelectorAll("select, [type=range], [type=number]")) field.hidden = true;
    return;
  }
  link.textContent = name.toUpperCase();
  if (/N\d+$/.test(link.textContent)) link.href = `/m/${link.textContent}`;
  line.querySelector("select").value = amount === undefined || times ? "x" : amount === "0" ? "0" : "=";
  line.querySelector("[type=checkbox]").checked = !off;
  line.querySelector("[type=number]").value = amount ?? "4";
  follow(line);
}

/** Makes the slider, the number and the kind of edit show the same amount. */
function follow(line, from = null) {
  if (line.dataset.unread !== undefined) return line.classList.toggle("off", !isOn(line));
  const [choice, slider, number] = [line.querySelector("select"), line.querySelector("[type=range]"), line.querySelector("[type=number]")];
  if (from === slider) number.value = Number(Number(slider.value).toPrecision(3));
  const [low, high] = LIMITS[choice.value] ?? [0, 1];
  [slider.min, slider.max] = [Math.min(low, Number(number.value)), Math.max(high, Number(number.value))];
  slider.value = number.value;
  slider.disabled = number.disabled = choice.value === "0";
  line.classList.toggle("off", !isOn(line));
}

// A saved intervention or circuit

const MOST_EDITS = 500;
/** Returns the edits of a saved intervention as text, or throws an error that says why they cannot be used. */
function editsOfFile(text) {
  let saved;
  try { saved = JSON.parse(text); } catch { saved = null; }
  if (saved?.kind !== "memlens intervention" || !Array.isArray(saved.edits)) throw new Error("this file is not a saved intervention; save one with memlens trace --save, or with memlens circuit --pairs and --save");
  if (saved.model && saved.model.fingerprint !== form.dataset.fingerprint) throw new Error(`this file is for ${saved.model.name}, not for the model of this index`);
  if (saved.edits.some((edit) => edit.positions !== "all")) throw new Error("this file edits single positions of a prompt; use it with memlens trace --file");
  const amount = (edit) => (edit.action === "scale" ? `x${edit.factor}` : edit.action === "set" ? Number(edit.coefficient.toPrecision(6)) : 0);
  const edits = saved.edits.flatMap((edit) => (edit.memories ?? [edit.expert ?? `L${edit.layer}`]).map((target) => `${target}=${amount(edit)}`));
  if (edits.length > MOST_EDITS) throw new Error(`this file has ${edits.length} edits; this page takes up to ${MOST_EDITS}`);
  return edits;
}

async function openFile(column, field) {
  const problem = column.querySelector(".note");
  try {
    const edits = editsOfFile(await field.files[0].text());
    problem.hidden = true;
    edits.forEach((edit) => addEdit(column, edit));
    announce(`${edits.length} edits added`);
    show();
  } catch (error) {
    Object.assign(problem, { hidden: false, textContent: error.message });
  }
  field.value = ""; // so that the same file can be opened again
}

// The address

function settings() {
  const given = new URLSearchParams(new FormData(form));
  for (const [name, plain] of [["count", "40"], ["temperature", "0"], ["seed", "0"]]) if (given.get(name) === plain) given.delete(name);
  return given;
}

function address() {
  const query = settings();
  for (const column of columns.slice(1)) {
    for (const line of column.hidden ? [] : column.querySelectorAll(".edits li")) query.append(column.dataset.set, (isOn(line) ? "" : "!") + textOf(line));
  }
  return `/steer?${query}`;
}

function read() {
  const query = new URLSearchParams(location.search);
  for (const name of ["prompt", "count", "temperature", "seed"]) if (query.get(name)) form.elements[name].value = query.get(name);
  for (const column of columns.slice(1)) query.getAll(column.dataset.set).forEach((text) => addEdit(column, text));
  columns[2].hidden = !query.has("other");
}

const quoted = (text) => (/^[\w.,\/-][\w=.,\/-]*$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

function command(column) {
  const given = settings();
  const options = ["temperature", "seed"].filter((name) => given.has(name)).map((name) => `--${name} ${given.get(name)}`);
  const sets = editsOf(column).map((edit) => `--set ${quoted(edit)}`);
  const prompt = given.get("prompt");
  const words = [...sets, `--generate ${given.get("count") ?? 40}`, ...options];
  return [`memlens trace ${form.dataset.folder}`, ...(prompt.startsWith("-") ? [...words, "--", quoted(prompt)] : [quoted(prompt), ...words])].join(" ");
}

// Continuations

const running = new Map(); // column -> its AbortController
const written = new Map(); // column -> its tokens
const asked = new Map(); // column -> the query of its text

function mark(column) {
  const [own, plain] = [written.get(column) ?? [], written.get(original) ?? []];
  [...column.querySelectorAll(".going span:not(.given)")].forEach((part, place) => part.classList.toggle("differs", column !== original && place < plain.length && plain[place] !== own[place]));
}

async function goOn(column) {
  const query = settings();
  for (const edit of editsOf(column)) query.append("set", edit);
  if (asked.get(column) === String(query)) return;
  asked.set(column, String(query));
  running.get(column)?.abort();
  column.querySelector(".next").replaceChildren();
  const stop = new AbortController();
  running.set(column, stop);
  const [shown, problem] = [column.querySelector(".going"), column.querySelector(".note")];
  const given = html("span", { className: "given", textContent: query.get("prompt") });
  written.set(column, []);
  try {
    const response = await fetch(`/api/steer?${query}`, { signal: stop.signal });
    if (!response.ok) throw new Error((await response.json()).error);
    if (problem) problem.hidden = true;
    shown.replaceChildren(given);
    shown.classList.add("busy");
    const lines = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await lines.read()).done; ) {
      const whole = (rest + part.value).split("\n");
      rest = whole.pop();
      for (const line of whole.map((one) => JSON.parse(one))) {
        if (line.error !== undefined) throw new Error(line.error);
        if (line.id !== undefined) addToken(column, shown, line);
      }
    }
    shown.classList.remove("busy");
    await showNext(column, query, stop.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    asked.delete(column);
    if (problem) Object.assign(problem, { hidden: false, textContent: error.message });
    else shown.textContent = error.message;
  }
  shown.classList.remove("busy");
  if (column !== original) announce("the edited continuation is complete");
}

function addToken(column, shown, token) {
  written.get(column).push(token.id);
  const text = token.text.replace(/^⟨([0-7][0-9A-F])⟩$/, (_, byte) => String.fromCharCode(parseInt(byte, 16)));
  shown.append(html("span", { textContent: text, title: `p ${token.p.toPrecision(3)}` }));
  columns.forEach(mark);
}

/** Shows the distribution of the next token and its change by the edits. */
async function showNext(column, query, signal) {
  const given = new URLSearchParams([["prompt", query.get("prompt")], ...query.getAll("set").map((edit) => ["set", edit])]);
  const found = await ask(`/api/trace/answer?${given}`, { signal });
  const tokens = (found.after ?? found).layers.at(-1).output.slice(0, 6);
  const title = html("h3", { textContent: found.kl === undefined ? "Next token" : `Next token, KL ${found.kl.toPrecision(3)} nats` });
  column.querySelector(".next").replaceChildren(title, tokenBars(tokens));
  if (column === original) suggest(found);
}

/** Offers the memories with the largest effect on the prediction of the original as edits. */
function suggest({ layers, prediction }) {
  const memories = layers.flatMap((layer) => layer.by_effect);
  memories.sort((one, other) => Math.abs(other.effect) - Math.abs(one.effect));
  const effect = (one) => `${one.effect > 0 ? "+" : "−"}${Math.abs(one.effect).toFixed(2)}`;
  for (const line of document.querySelectorAll(".suggestions")) {
    const buttons = memories.slice(0, 5).map((one) => {
      const title = `effect on the logit of “${prediction.text}”${one.patterns.length ? `; ${one.patterns[0]}` : ""}`;
      return html("button", { type: "button", textContent: `${one.memory} ${effect(one)}`, title, value: one.memory });
    });
    line.replaceChildren("matter most for this prediction:", ...buttons);
  }
}

function show() {
  const isWriting = [...document.querySelectorAll(".edits [type=number]")].some((field) => !field.hidden && !field.disabled && field.value === "");
  if (isWriting || !form.reportValidity()) return;
  history.replaceState(null, "", address());
  for (const column of columns) {
    if (column !== original) column.querySelector(".command code").textContent = command(column);
    const waits = column.hidden || (column !== original && !column.querySelector(".edits li"));
    if (!waits && document.querySelector(".model-status").dataset.status === "ready") goOn(column);
  }
}
const showSoon = debounced(show, 250);

form.addEventListener("input", showSoon);
form.addEventListener("submit", (event) => event.preventDefault());
for (const column of columns.slice(1)) {
  column.querySelector(".edits").addEventListener("input", (event) => (follow(event.target.closest("li"), event.target), showSoon()));
  column.querySelector(".edits").addEventListener("click", (event) => {
    if (!event.target.closest(".remove")) return;
    event.target.closest("li").remove();
    showSoon();
  });
  column.querySelector(".add").addEventListener("submit", (event) => {
    event.preventDefault();
    const field = event.target.querySelector("input");
    addEdit(column, field.value);
    field.value = "";
    show();
  });
  column.querySelector(".suggestions").addEventListener("click", (event) => {
    if (!event.target.value) return;
    addEdit(column, `${event.target.value}=0`);
    show();
  });
  column.querySelector("[type=file]").addEventListener("change", (event) => openFile(column, event.target));
}
form.querySelector(".second").addEventListener("click", (event) => {
  columns[2].hidden = !columns[2].hidden;
  event.target.setAttribute("aria-expanded", String(!columns[2].hidden));
  show();
});
document.addEventListener("memlens:model", () => location.reload());
read();
show();
