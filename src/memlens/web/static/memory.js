// The page of one memory: highlighting of patterns, shading, edits, saving, related memories, contexts, shortcuts.
import { announce, ask, debounced, here, tell } from "./base.js";

const article = document.querySelector(".memory-page");
const { name, end } = article.dataset;
const lines = [...article.querySelectorAll(".trigger-list li")];

// Patterns

function choosePattern(chip) {
  const wasPressed = chip.getAttribute("aria-pressed") === "true";
  for (const other of article.querySelectorAll("[data-pattern]")) other.setAttribute("aria-pressed", "false");
  chip.setAttribute("aria-pressed", String(!wasPressed));
  for (const list of article.querySelectorAll(".trigger-list")) list.classList.toggle("chosen", !wasPressed);
  let count = 0;
  for (const line of lines) {
    const has = !wasPressed && line.dataset.patterns.split(" ").includes(chip.dataset.pattern);
    line.classList.toggle("has", has);
    count += has;
  }
  announce(wasPressed ? "no pattern is highlighted" : `${count} triggers have this pattern`);
}
for (const chip of article.querySelectorAll("[data-pattern]")) chip.addEventListener("click", () => choosePattern(chip));

// Shading: the coefficient at every token of the triggers

const KEPT = 260; // number of characters to show before the trigger position, as on the unshaded page

/** Returns text as the server's pages show it. */
const visible = (text) => text.replace(/[\n\r]/g, "⏎").replace(/\t/g, "⇥").replace(/[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\u202a-\u202e\u2066-\u2069]/gu, "\ufffd");

function shaded(text, coefficient, strongest) {
  const part = document.createElement("span");
  part.textContent = visible(text);
  const strength = Math.round((70 * Math.abs(coefficient)) / strongest);
  if (strength > 1) {
    part.className = coefficient < 0 ? "shade negative" : "shade";
    part.style.setProperty("--strength", strength);
  }
  part.title = coefficient.toPrecision(4);
  return part;
}

function shade(line, trigger, strongest) {
  const before = line.querySelector(".before");
  const mark = line.querySelector("mark");
  if (trigger.position < 0) return;
  let first = trigger.position;
  for (let length = 0; first > 0 && length + trigger.tokens[first - 1].length <= KEPT; first--) length += trigger.tokens[first - 1].length;
  const parts = trigger.tokens.slice(first, trigger.position).map((token, place) => shaded(token, trigger.coefficients[first + place], strongest));
  before.replaceChildren(...(first > 0 ? ["…"] : []), ...parts);
  const at = shaded(mark.textContent, trigger.coefficients[trigger.position], strongest);
  at.classList.add("shade", "at");
  mark.replaceWith(at);
}

async function shadeAll() {
  const status = article.querySelector(".live");
  if (!lines.length) return;
  try {
    const found = await ask(`/api/memories/${name}/coefficients?end=${end}`);
    const strongest = Math.max(...found.flatMap((one) => one.coefficients.map(Math.abs)), 1e-9);
    const byRank = new Map(lines.map((line) => [Number(line.dataset.rank), line]));
    for (const one of found) if (byRank.has(one.rank)) shade(byRank.get(one.rank), one, strongest);
    const hasNegative = found.some((one) => one.coefficients.some((c) => c < -strongest / 50));
    status.innerHTML = `<span class="scale">Tokens are shaded by the coefficient: 0 <i></i> ${strongest.toPrecision(3)}${hasNegative ? ' <i class="negative"></i> negative' : ""}</span>`;
  } catch (error) {
    status.textContent = `Cannot shade tokens: ${error.message}`;
  }
  status.hidden = false;
  article.dataset.shaded = "yes";
}

// Try it: a typed text, shaded on a scale up to the strongest coefficient of the scan

const tryField = document.getElementById("try");
let tries = 0;

async function tryText() {
  const [mine, shown] = [++tries, article.querySelector(".tried")];
  const text = tryField.value;
  if (!text.trim()) return shown.replaceChildren();
  try {
    const found = await ask(`/api/memories/${name}/on?${new URLSearchParams({ text })}`);
    if (mine !== tries) return; // the text has changed since
    const strongest = Math.max(Number(article.dataset.strongest), ...found.coefficients.map(Math.abs), 1e-9);
    shown.replaceChildren(...found.tokens.map((token, place) => shaded(token, found.coefficients[place], strongest)));
    const most = found.coefficients.reduce((best, one, place) => (Math.abs(one) > Math.abs(found.coefficients[best]) ? place : best), 0);
    const summary = `strongest ${found.coefficients[most].toPrecision(4)} at “${found.tokens[most]}”, ${Math.round((100 * Math.abs(found.coefficients[most])) / strongest)}% of its range`;
    shown.append(Object.assign(document.createElement("small"), { className: "quiet", textContent: summary }));
  } catch (error) {
    if (mine === tries) shown.textContent = error.message;
  }
}
tryField?.addEventListener("input", debounced(tryText, 120));

// Edits

function bars(tokens, title, others) {
  const most = Math.max(...tokens.map((one) => one.p), 1e-9);
  const part = document.createElement("div");
  part.append(Object.assign(document.createElement("h3"), { textContent: title }));
  const lines = Object.assign(document.createElement("ol"), { className: "bars" });
  for (const one of tokens) {
    const line = document.createElement("li");
    const token = Object.assign(document.createElement("span"), { className: "token", textContent: one.text.replace(/^ /, "␣") || "∅" });
    const bar = Object.assign(document.createElement("span"), { className: "bar" });
    bar.style.setProperty("--share", `${(100 * one.p) / most}%`);
    const number = Object.assign(document.createElement("span"), { className: "n", textContent: `${(100 * one.p).toPrecision(3)}%` });
    const was = others?.find((other) => other.id === one.id);
    if (others) number.title = was ? `was ${(100 * was.p).toPrecision(3)}%` : "was not in this list";
    line.append(token, bar, number);
    lines.append(line);
  }
  part.append(lines);
  return part;
}

function showOutcome(holder, found, edit) {
  const verdict = document.createElement("p");
  verdict.className = "verdict";
  const [before, after] = [found.before, found.after].map((trace) => trace.layers.at(-1).output);
  const [was, is] = [before[0], after[0]].map((one) => `“${one.text.trim() || one.text}”`);
  verdict.textContent = found.changes_prediction
    ? `The prediction changes from ${was} to ${is}.`
    : `The prediction stays ${was}.`;
  const distance = Object.assign(document.createElement("span"), { className: "quiet", textContent: ` KL ${found.kl.toPrecision(3)} nats, ${edit}` });
  verdict.append(distance);
  const pair = Object.assign(document.createElement("div"), { className: "pair" });
  pair.append(bars(before, "Original"), bars(after, "Edited", before));
  holder.replaceChildren(verdict, pair);
}

const form = article.querySelector(".silence-form");
form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const holder = article.querySelector(".outcome");
  const waiting = form.querySelector(".waiting");
  waiting.textContent = "computing …";
  try {
    const given = Object.fromEntries(new FormData(form));
    showOutcome(holder, await tell(`/api/memories/${name}/silence`, given), `${name}=${given.change}`);
  } catch (error) {
    holder.replaceChildren(Object.assign(document.createElement("p"), { className: "note error", textContent: error.message }));
  }
  waiting.textContent = "";
});

// Saving: every change is saved at once

const keep = article.querySelector(".keep");

/** Saves only the fields that were changed here, because other people may have changed other fields. */
async function save(changed) {
  const status = keep.querySelector("[role=status]");
  try {
    await tell(`/api/collections/${name}`, changed, "PATCH");
    status.textContent = "saved";
  } catch (error) {
    status.textContent = error.message;
  }
}
keep?.addEventListener("submit", (event) => event.preventDefault());
keep?.addEventListener("change", ({ target }) => {
  const parts = () => target.value.split(",").map((one) => one.trim()).filter(Boolean);
  if (["name", "note", "lists"].includes(target.name)) save({ [target.name]: target.name === "lists" ? parts() : target.value });
});
keep?.querySelector(".star").addEventListener("click", ({ currentTarget }) => {
  const star = currentTarget.getAttribute("aria-pressed") !== "true";
  currentTarget.setAttribute("aria-pressed", String(star));
  save({ star });
});

// Related memories

function cell(content) {
  const made = document.createElement("td");
  made.append(content);
  return made;
}

function relatedTable(found) {
  const table = document.createElement("table");
  table.innerHTML = '<thead><tr><th scope="col">memory</th><th scope="col">shared</th><th scope="col">summary</th></tr></thead><tbody></tbody>';
  for (const one of found) {
    const row = document.createElement("tr");
    const link = Object.assign(document.createElement("a"), { className: "memory", href: here(`/m/${one.name}`), textContent: one.name });
    const shared = [`${one.triggers} triggers`, ...(one.tokens === null ? [] : [`${one.tokens} tokens`])].join(", ");
    row.append(cell(link), cell(shared), cell(Object.assign(document.createElement("bdi"), { textContent: one.summary ?? "" })));
    table.tBodies[0].append(row);
  }
  return table;
}

async function showRelated() {
  const holder = article.querySelector(".related-holder");
  if (!holder) return;
  try {
    const found = await ask(`/api/memories/${name}/related`);
    holder.replaceWith(found.length ? relatedTable(found) : Object.assign(document.createElement("p"), { className: "quiet", textContent: "No other memory shares triggers, patterns or tokens with it." }));
  } catch (error) {
    holder.textContent = error.message;
  }
}

// Nearest memories by the cosine of keys and values

function nearestTable(found) {
  const table = document.createElement("table");
  table.innerHTML = '<thead><tr><th scope="col">memory</th><th scope="col">cosine</th><th scope="col">summary</th></tr></thead><tbody></tbody>';
  for (const one of found) {
    const row = document.createElement("tr");
    const link = Object.assign(document.createElement("a"), { className: "memory", href: `/m/${one.name}`, textContent: one.name });
    row.append(cell(link), cell(one.cosine.toFixed(3)), cell(Object.assign(document.createElement("bdi"), { textContent: one.summary ?? "" })));
    table.tBodies[0].append(row);
  }
  return table;
}

async function showNearest() {
  for (const part of article.querySelectorAll("[data-side]")) {
    const holder = part.querySelector(".nearest-holder");
    if (!holder) continue;
    try {
      holder.replaceWith(nearestTable(await ask(`/api/memories/${name}/nearest?by=${part.dataset.side}&limit=8`)));
    } catch (error) {
      holder.textContent = error.message;
    }
  }
}

// The tokens that change most if the memory is silenced at its triggers

function effectTable(title, found) {
  const part = document.createElement("section");
  const table = document.createElement("table");
  table.innerHTML = '<thead><tr><th scope="col"></th><th scope="col">change</th><th scope="col">other memory</th></tr></thead><tbody></tbody>';
  for (const one of found) {
    const row = document.createElement("tr");
    const label = Object.assign(document.createElement("span"), { className: "token", textContent: visible(one.text.replace(/^ /, "␣")) });
    row.append(cell(label), ...[one.change, one.control].map((change) => cell(change.toFixed(4).replace("-", "−"))));
    table.tBodies[0].append(row);
  }
  part.append(Object.assign(document.createElement("h3"), { textContent: title }), table);
  return part;
}

article.querySelector(".show-effect")?.addEventListener("click", async (event) => {
  const holder = article.querySelector(".effect-holder");
  event.target.disabled = true;
  holder.textContent = "Computing …";
  try {
    const { falls, rises, note } = await ask(`/api/memories/${name}/effect`);
    holder.replaceChildren(effectTable("Falls", falls), effectTable("Rises", rises), Object.assign(document.createElement("p"), { className: "quiet", textContent: note }));
    event.target.parentElement.remove();
  } catch (error) {
    holder.textContent = error.message;
    event.target.disabled = false;
  }
});

// Wires: tokens and earlier memories that the keys respond to, later memories that the value feeds

function wiresTable(title, found) {
  const part = document.createElement("section");
  const table = document.createElement("table");
  table.innerHTML = '<thead><tr><th scope="col"></th><th scope="col">by</th><th scope="col">cosine</th><th scope="col">z</th></tr></thead><tbody></tbody>';
  for (const one of found) {
    const row = document.createElement("tr");
    const label = one.memory ? Object.assign(document.createElement("a"), { className: "memory", href: `/m/${one.memory}`, textContent: one.memory }) : Object.assign(document.createElement("span"), { className: "token", textContent: visible(one.text.replace(/^ /, "␣")) });
    if (one.summary) label.title = one.summary;
    row.append(cell(label), cell(one.by), cell(one.cosine.toFixed(3)), cell(one.z.toFixed(1)));
    table.tBodies[0].append(row);
  }
  part.append(Object.assign(document.createElement("h3"), { textContent: title }), found.length ? table : Object.assign(document.createElement("p"), { className: "quiet", textContent: "none" }));
  return part;
}

article.querySelector(".show-wires")?.addEventListener("click", async (event) => {
  const holder = article.querySelector(".wires-holder");
  event.target.disabled = true;
  holder.textContent = "Computing …";
  try {
    const { tokens, reads, feeds } = await ask(`/api/memories/${name}/wires`);
    holder.replaceChildren(wiresTable("Reads tokens", tokens), wiresTable("Reads earlier memories", reads), wiresTable("Feeds later memories", feeds));
    event.target.parentElement.remove();
  } catch (error) {
    holder.textContent = error.message;
    event.target.disabled = false;
  }
});

// The context of a trigger in its document

const inline = (tag, text) => Object.assign(document.createElement(tag), { textContent: visible(text) });

async function toggleContext(link) {
  const line = link.closest("li");
  const open = line.querySelector(".context");
  link.setAttribute("aria-expanded", String(!open));
  if (open) return open.remove();
  const made = Object.assign(document.createElement("blockquote"), { className: "context" });
  try {
    const found = await ask(`/api/sentences/${line.dataset.sentence}`);
    const where = inline("p", `${found.source}, sentence ${found.sentence.toLocaleString("en")}`);
    where.className = "quiet";
    const text = document.createElement("bdi");
    const parts = [...found.before.map((one) => inline("span", one)), inline("b", found.text), ...found.after.map((one) => inline("span", one))];
    text.append(...parts.flatMap((one) => [one, " "]));
    made.append(where, document.createElement("p"));
    made.lastChild.append(text);
  } catch (error) {
    made.textContent = error.message;
  }
  line.append(made);
}
article.addEventListener("click", (event) => {
  const link = event.target.closest(".context-of");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  toggleContext(link);
});

// [ and ] open the neighbors

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const way = { "[": "prev", "]": "next" }[event.key];
  if (way) document.querySelector(`a[rel=${way}]`)?.click();
});

const model = document.querySelector(".model-status");
async function askModel() {
  if (model.dataset.status === "failed") for (const holder of article.querySelectorAll(".nearest-holder")) holder.textContent = model.title;
  if (model.dataset.status !== "ready") return;
  await shadeAll();
  await showNearest();
}
askModel();
document.addEventListener("memlens:model", askModel);
showRelated();
