// Keyboard shortcuts and counts for the labeling form, which shows only the patterns in use. It works without this script.
import { announce, html } from "./base.js";

const form = document.querySelector(".labeling");
const slots = [...form.querySelectorAll(".slot")];
const lines = [...form.querySelectorAll(".prefixes li[data-rank]")];
const add = form.querySelector(".add");
const least = Number(form.dataset.least);
form.classList.add("live"); // with few patterns shown, the list can stay visible on a phone
let chosen = 0;
let at = 0;
let changed = false;

const text = (slot) => slots[slot].querySelector("input[name^=text]");
const ticks = (slot) => [...form.querySelectorAll(`.ticks label[data-slot="${slot}"] input`)];
const isUsed = (slot) => text(slot).value.trim() !== "" || ticks(slot).some((tick) => tick.checked);

/** Number of visible patterns: patterns in use, added patterns, and at least one. */
let shown = Math.max(1, ...slots.map((_, slot) => (isUsed(slot) ? slot + 1 : 0)));

function draw() {
  slots.forEach((line, slot) => {
    line.hidden = slot >= shown;
    line.classList.toggle("chosen", slot === chosen);
    const count = ticks(slot).filter((tick) => tick.checked).length;
    const counter = line.querySelector(".count");
    counter.textContent = count;
    counter.classList.toggle("short", isUsed(slot) && count < least);
    counter.title = isUsed(slot) && count < least ? `a pattern needs ${least} prefixes` : "prefixes";
    for (const tick of ticks(slot)) tick.parentElement.hidden = slot >= shown;
  });
  lines.forEach((line) => line.classList.toggle("has", line.querySelector(`label[data-slot="${chosen}"] input`).checked));
  add.hidden = shown >= slots.length;
}

function choose(slot) {
  if (slot >= shown) return;
  chosen = slot;
  draw();
  announce(`pattern ${slot + 1} ${text(slot).value}`);
}

function name(slot) {
  shown = Math.max(shown, slot + 1);
  chosen = slot;
  draw();
  text(slot).focus();
}

/** Focus the first pattern without a name, or a new one. */
function nameNext() {
  const free = slots.findIndex((_, slot) => !text(slot).value.trim());
  if (free >= 0) name(free);
}

function go(place) {
  if (!lines.length) return;
  lines[at].tabIndex = -1;
  lines[at].classList.remove("at");
  at = Math.min(Math.max(place, 0), lines.length - 1);
  lines[at].tabIndex = 0;
  lines[at].classList.add("at");
  lines[at].focus({ preventScroll: true });
  lines[at].scrollIntoView({ block: "nearest" });
}

function toggle() {
  const tick = lines[at]?.querySelector(`label[data-slot="${chosen}"] input`);
  if (!tick) return;
  tick.checked = !tick.checked;
  changed = true;
  draw();
  announce(`prefix ${lines[at].dataset.rank} ${tick.checked ? "has" : "does not have"} pattern ${chosen + 1}`);
}

function switchKind() {
  const kinds = [...slots[chosen].querySelectorAll("input[type=radio]")];
  const next = kinds[(kinds.findIndex((kind) => kind.checked) + 1) % kinds.length];
  next.checked = true;
  changed = true;
  announce(next.value);
}

const KEYS = {
  j: () => go(at + 1),
  k: () => go(at - 1),
  ArrowDown: () => go(at + 1),
  ArrowUp: () => go(at - 1),
  " ": toggle,
  x: toggle,
  n: nameNext,
  s: switchKind,
  u: () => document.querySelector(".undo:not([hidden]) button")?.click(),
  "[": () => document.querySelector(".neighbors [rel=prev]")?.click(),
  "]": () => document.querySelector(".neighbors [rel=next]")?.click(),
};

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    event.preventDefault();
    form.requestSubmit();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("input, textarea, select, button, summary, a");
  if (field?.matches("input[name^=text]")) {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault(); // Enter ends naming and returns to the prefixes
    go(at);
    return;
  }
  if (field && !field.matches("input[type=checkbox]")) return;
  if (/^[1-9]$/.test(event.key)) {
    event.preventDefault();
    const slot = Number(event.key) - 1;
    if (slot < shown) choose(slot);
    else if (slot === shown && slot < slots.length) name(slot);
    return;
  }
  if (!KEYS[event.key]) return;
  if (event.key === " " && field) return; // the browser toggles a focused checkbox itself
  event.preventDefault();
  KEYS[event.key]();
});

slots.forEach((line, slot) => line.addEventListener("focusin", () => chosen !== slot && choose(slot)));
lines.forEach((line, place) =>
  line.addEventListener("click", (event) => {
    if (event.target.closest("label")) return;
    go(place);
    toggle();
  }),
);
form.addEventListener("input", (event) => {
  changed = true;
  const tick = event.target.closest(".ticks label");
  if (tick) chosen = Number(tick.dataset.slot);
  draw();
});
/** Return [slot, message] for the first pattern that the server would reject, or null. */
function findProblem() {
  for (const [slot, line] of slots.entries()) {
    if (!isUsed(slot)) continue;
    if (!text(slot).value.trim()) return [slot, `Pattern ${slot + 1} has no description. Add one.`];
    const count = Number(line.querySelector(".count").textContent);
    if (count < least) return [slot, `Pattern ${slot + 1} has ${count} of the ${least} prefixes that a pattern needs; select more.`];
  }
  return null;
}

form.addEventListener("submit", (event) => {
  draw();
  const problem = findProblem();
  let alert = document.querySelector(".note.error");
  if (!problem) {
    changed = false;
    return;
  }
  event.preventDefault();
  if (!alert) {
    alert = html("p", { className: "note error" });
    alert.setAttribute("role", "alert");
    form.querySelector(".actions").before(alert);
  }
  alert.textContent = problem[1];
  choose(problem[0]);
});
document.querySelector(".undo").addEventListener("submit", () => (changed = false));
add.addEventListener("click", () => name(shown));
window.addEventListener("beforeunload", (event) => changed && event.preventDefault());

draw();
const hasKeyboard = matchMedia("(hover: hover)").matches; // on a touch screen, focus would open the on-screen keyboard
if (hasKeyboard && !document.querySelector("[role=alert]")) isUsed(0) ? go(0) : text(0).focus();
