// The page Trace: opens cells in place, moves through the grid with arrow keys, copies links, waits for the model.
import { announce } from "./base.js";

const grid = document.querySelector(".grid");
const place = document.getElementById("cell");
const answer = document.getElementById("answer");
let asked = 0;

/** Opens a cell. The server renders the parts around the grid. */
async function openCell(cell, isNew = true) {
  const mine = ++asked;
  const address = new URL(cell.href);
  place.classList.add("busy");
  try {
    const response = await fetch(`/trace/cell${address.search}`);
    if (!response.ok) throw new Error();
    const text = await response.text();
    if (mine !== asked) return; // another cell was opened since
    const parts = new DOMParser().parseFromString(text, "text/html");
    place.replaceChildren(document.adoptNode(parts.querySelector(".opened")));
    answer.replaceChildren(document.adoptNode(parts.querySelector(".answer")));
    mark(cell);
    if (isNew) history.pushState(null, "", address);
    if (isNew) bringIntoView();
    announce(cell.title);
  } catch {
    location.href = cell.href; // the page shows the error
  } finally {
    if (mine === asked) place.classList.remove("busy");
  }
}

/** Scrolls so that the opened cell starts in the upper half of the screen. */
function bringIntoView() {
  const below = place.getBoundingClientRect().top - window.innerHeight * 0.5;
  if (below > 0) window.scrollBy({ top: below, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

function mark(cell) {
  for (const other of grid.querySelectorAll(".cell[aria-current]")) {
    other.removeAttribute("aria-current");
    other.tabIndex = -1;
  }
  cell.setAttribute("aria-current", "true");
  cell.tabIndex = 0;
  grid.querySelectorAll("thead th").forEach((head, column) => head.classList.toggle("open", column === Number(cell.dataset.at) + 1));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(event) {
  const cell = event.target.closest(".cell");
  if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
  const at = [Number(cell.dataset.layer), Number(cell.dataset.at)];
  const width = grid.tHead.rows[0].cells.length - 1;
  const step = STEPS[event.key];
  if (step) at.forEach((_, axis) => (at[axis] += step[axis]));
  else if (event.key === "Home") at[1] = 0;
  else if (event.key === "End") at[1] = width - 1;
  else if (event.key === " ") return event.preventDefault(), openCell(cell);
  else return;
  event.preventDefault();
  const next = grid.querySelector(`.cell[data-layer="${at[0]}"][data-at="${at[1]}"]`);
  if (!next) return;
  cell.tabIndex = cell.hasAttribute("aria-current") ? 0 : -1;
  next.tabIndex = 0;
  next.focus();
}

if (grid) {
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (!cell || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    openCell(cell);
  });
  grid.addEventListener("keydown", move);
  const first = grid.querySelector(".cell[aria-current]"); // the cell that is open if the address names none
  window.addEventListener("popstate", () => {
    const query = new URLSearchParams(location.search);
    const place = [query.get("layer") ?? NaN, query.get("at") ?? NaN].map(Number);
    openCell(grid.querySelector(`.cell[data-layer="${place[0]}"][data-at="${place[1]}"]`) ?? first, false);
  });
  // keep the open cell visible if the grid is wider than the screen
  const box = grid.parentElement;
  if (first) {
    const [cell, frame] = [first.getBoundingClientRect(), box.getBoundingClientRect()];
    box.scrollBy(Math.max(0, cell.right - frame.right + 16), Math.max(0, cell.bottom - frame.bottom + 8));
  }
}

// Enter traces, Shift+Enter starts a new line
document.getElementById("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});

if (document.querySelector(".waiting")) document.addEventListener("memlens:model", () => location.reload());
