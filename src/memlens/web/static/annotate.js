// Labelling by keyboard: the form works without this; here are keys, counts, and only as many patterns as are in use.
import { announce } from "./base.js";

const form = document.querySelector(".labelling");
const slots = [...form.querySelectorAll(".slot")];
const lines = [...form.querySelectorAll(".prefixes li[data-rank]")];
const add = form.querySelector(".add");
const least = Number(form.dataset.least);
form.classList.add("live"); // few patterns are shown, so they may stay in sight on a phone
let chosen = 0;
let at = 0;
let changed = false;

const text = (slot) => slots[slot].querySelector("input[name^=text]");
const ticks = (slot) => [...form.querySelectorAll(`.ticks label[data-slot="${slot}"] input`)];
const isUsed = (slot) => text(slot).value.trim() !== "" || ticks(slot).some((tick) => tick.checked);

/** How many patterns are shown: those in use, those that were asked for, and always one. */
let shown = Math.max(1, ...slots.map((_, slot) => (isUsed(slot) ? slot + 1 : 0)));

function draw() {
  slots.forEach((line, slot) => {
    line.hidden = slot >= shown;
    line.classList.toggle("chosen", slot === chosen);
    const count = ticks(slot).filter((tick) => tick.checked).length;
    const told = line.querySelector(".count");
    told.textContent = count;
    told.classList.toggle("short", isUsed(slot) && count < least);
    told.title = isUsed(slot) && count < least ? `a pattern needs ${least} prefixes` : "prefixes";
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

/** The first pattern without a name, a new one if all have one. */
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
  announce(`prefix ${lines[at].dataset.rank} ${tick.checked ? "has" : "has not"} pattern ${chosen + 1}`);
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
  "[": () => document.querySelector(".neighbours [rel=prev]")?.click(),
  "]": () => document.querySelector(".neighbours [rel=next]")?.click(),
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
    event.preventDefault(); // Enter means: named, now tick
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
  if (event.key === " " && field) return; // a box that has the focus ticks itself
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
/** What the server would refuse, said before it is asked. */
function whatIsWrong() {
  for (const [slot, line] of slots.entries()) {
    if (!isUsed(slot)) continue;
    if (!text(slot).value.trim()) return [slot, `Pattern ${slot + 1} has no description; say in a few words what recurs.`];
    const count = Number(line.querySelector(".count").textContent);
    if (count < least) return [slot, `Pattern ${slot + 1} has ${count} of the ${least} prefixes that a pattern needs; tick more.`];
  }
  return null;
}

form.addEventListener("submit", (event) => {
  draw();
  const wrong = whatIsWrong();
  let told = document.querySelector(".note.error");
  if (!wrong) {
    changed = false;
    return;
  }
  event.preventDefault();
  if (!told) {
    told = Object.assign(document.createElement("p"), { className: "note error" });
    told.setAttribute("role", "alert");
    form.querySelector(".actions").before(told);
  }
  told.textContent = wrong[1];
  choose(wrong[0]);
});
document.querySelector(".undo").addEventListener("submit", () => (changed = false));
add.addEventListener("click", () => name(shown));
window.addEventListener("beforeunload", (event) => changed && event.preventDefault());

draw();
const hasKeyboard = matchMedia("(hover: hover)").matches; // elsewhere the focus would open a keyboard on the screen
if (hasKeyboard && !document.querySelector("[role=alert]")) isUsed(0) ? go(0) : text(0).focus();
