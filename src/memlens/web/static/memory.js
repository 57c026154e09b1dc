// The page of one memory: highlighting of patterns, shading, edits, saving, related memories, contexts, shortcuts.
import { announce, ask, debounced, here, html, percent, tableOf, tell, tokenBars } from "./base.js";

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
  // divide the shown text into tokens from its end, so that no line moves
  let rest = before.textContent;
  const parts = [];
  for (let place = trigger.position - 1; place >= 0 && rest; place--) {
    const start = Math.max(0, rest.length - visible(trigger.tokens[place]).length);
    parts.unshift(shaded(rest.slice(start), trigger.coefficients[place], strongest));
    rest = rest.slice(0, start);
  }
  before.replaceChildren(rest, ...parts);
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
    status.innerHTML = `<span class="scale">Tokens are shaded by coefficient: 0 <i></i> ${strongest.toPrecision(3)}${hasNegative ? ' <i class="negative"></i> negative' : ""}</span>`;
  } catch (error) {
    status.textContent = `Cannot shade tokens: ${error.message}`;
  }
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
    shown.append(html("small", { className: "quiet", textContent: summary }));
  } catch (error) {
    if (mine === tries) shown.textContent = error.message;
  }
}
tryField?.addEventListener("input", debounced(tryText, 120));

// Edits

function bars(tokens, title, others) {
  const withNote = tokens.map((one) => {
    const was = others?.find((other) => other.id === one.id);
    return { ...one, note: others && (was ? `was ${percent(was.p)}` : "was not in the list before") };
  });
  return html("div", {}, html("h3", { textContent: title }), tokenBars(withNote, Math.max(...tokens.map((one) => one.p), 1e-9)));
}

function showOutcome(holder, found, edit) {
  const verdict = document.createElement("p");
  verdict.className = "verdict";
  const [before, after] = [found.before, found.after].map((trace) => trace.layers.at(-1).output);
  const [was, is] = [before[0], after[0]].map((one) => `“${one.text.trim() || one.text}”`);
  verdict.textContent = found.changes_prediction
    ? `The prediction changes from ${was} to ${is}.`
    : `The prediction stays ${was}.`;
  const distance = html("span", { className: "quiet", textContent: ` KL ${found.kl.toPrecision(3)} nats, ${edit}` });
  verdict.append(distance);
  const pair = html("div", { className: "pair" });
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
    holder.replaceChildren(html("p", { className: "note error", textContent: error.message }));
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

const linkTo = (memory) => html("a", { className: "memory", href: here(`/m/${memory}`), textContent: memory });
const summaryOf = (one) => html("bdi", { textContent: one.summary ?? "" });

function relatedTable(found) {
  const shared = (one) => [`${one.triggers} triggers`, ...(one.tokens === null ? [] : [`${one.tokens} tokens`])].join(", ");
  return tableOf(["memory", "shared", "summary"], found.map((one) => [linkTo(one.name), shared(one), summaryOf(one)]));
}

async function showRelated() {
  const holder = article.querySelector(".related-holder");
  if (!holder) return;
  try {
    const found = await ask(`/api/memories/${name}/related`);
    holder.replaceWith(found.length ? relatedTable(found) : html("p", { className: "quiet", textContent: "No other memory shares triggers, patterns or tokens with this one." }));
  } catch (error) {
    holder.textContent = error.message;
  }
}

// Nearest memories by the cosine of keys and values

function nearestTable(found) {
  return tableOf(["memory", "cosine", "summary"], found.map((one) => [linkTo(one.name), one.cosine.toFixed(3), summaryOf(one)]));
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

// Parts that are computed on request

const tokenOf = (one) => html("span", { className: "token", textContent: visible(one.text.replace(/^ /, "␣")) });
const titled = (title, content) => html("section", {}, html("h3", { textContent: title }), content);

/** Makes a button compute a part of the page. `build` returns its elements. */
function onRequest(part, build) {
  article.querySelector(`.show-${part}`)?.addEventListener("click", async ({ target }) => {
    const holder = article.querySelector(`.${part}-holder`);
    target.disabled = true;
    holder.textContent = "Computing …";
    try {
      holder.replaceChildren(...build(await ask(`/api/memories/${name}/${part}`)));
      target.parentElement.remove();
    } catch (error) {
      holder.textContent = error.message;
      target.disabled = false;
    }
  });
}

// The tokens that change most if the memory is silenced at its triggers
onRequest("effect", ({ falls, rises, note }) => {
  const number = (change) => change.toFixed(4).replace("-", "−");
  const table = (tokens) => tableOf(["", "change", "other memory"], tokens.map((one) => [tokenOf(one), number(one.change), number(one.control)]));
  return [titled("Falls", table(falls)), titled("Rises", table(rises)), html("p", { className: "quiet", textContent: note })];
});

// Wires: tokens and earlier memories that the key responds to, and later memories that respond to the value
onRequest("wires", ({ tokens, reads, feeds }) => {
  const row = (one) => {
    const label = one.memory ? linkTo(one.memory) : tokenOf(one);
    if (one.summary) label.title = one.summary;
    return [label, one.by, one.cosine.toFixed(3), one.z.toFixed(1)];
  };
  const table = (found) => (found.length ? tableOf(["", "by", "cosine", "z"], found.map(row)) : html("p", { className: "quiet", textContent: "none" }));
  return [titled("Reads tokens", table(tokens)), titled("Reads earlier memories", table(reads)), titled("Is read by later memories", table(feeds))];
});

// The context of a trigger in its document

const inline = (tag, text) => html(tag, { textContent: visible(text) });

async function toggleContext(link) {
  const line = link.closest("li");
  const open = line.querySelector(".context");
  link.setAttribute("aria-expanded", String(!open));
  if (open) return open.remove();
  const made = html("blockquote", { className: "context" });
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
  if (model.dataset.status === "failed") for (const holder of article.querySelectorAll(".live, .nearest-holder")) holder.textContent = model.title;
  if (model.dataset.status !== "ready") return;
  await shadeAll();
  await showNearest();
}
askModel();
document.addEventListener("memlens:model", askModel);
showRelated();
