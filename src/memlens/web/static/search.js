// Results while typing. Without this script the form still works.
import { askPage, debounced, here } from "./base.js";

const form = document.querySelector("form.search");
const results = document.getElementById("results");
let latest = 0;
let shown = address("/search/results"); // the query of the shown list

function address(path) {
  const usual = { in: "triggers", order: "max", by: "relative" };
  const given = [...new FormData(form)].filter(([name, value]) => value && value !== usual[name]);
  const query = new URLSearchParams(given).toString();
  return query ? `${path}?${query}` : path;
}

async function show() {
  const wanted = address("/search/results");
  if (wanted === shown) return;
  shown = wanted;
  const number = ++latest;
  results.setAttribute("aria-busy", "true");
  try {
    const text = await askPage(wanted);
    if (number !== latest) return; // the query has changed since
    if (text !== null) results.innerHTML = text;
    history.replaceState(null, "", here(address("/search")));
  } catch {
    if (number === latest) results.textContent = "The workbench does not respond. Check that it is still running.";
  }
  if (number === latest) results.setAttribute("aria-busy", "false");
}

const showSoon = debounced(show, 150);
form.addEventListener("input", showSoon);
form.addEventListener("change", show);

// The arrow keys move from the text field through the results

document.addEventListener("keydown", (event) => {
  if (!["ArrowDown", "ArrowUp"].includes(event.key) || event.target.closest("select, [type=radio]")) return;
  const stops = [document.getElementById("q"), ...results.querySelectorAll(".results a")];
  const at = stops.indexOf(document.activeElement);
  const next = stops[at + (event.key === "ArrowDown" ? 1 : -1)];
  if (at < 0 || !next) return;
  event.preventDefault();
  next.focus();
});
