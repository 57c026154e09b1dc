// Results as one types. The form works without this; here it is only asked for earlier, and in place.
import { askPage, debounced, here } from "./base.js";

const form = document.querySelector("form.search");
const results = document.getElementById("results");
let latest = 0;
let shown = address("/search/results"); // what the list on the page is the answer to

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
    if (number !== latest) return; // something else was written meanwhile
    if (text !== null) results.innerHTML = text;
    history.replaceState(null, "", here(address("/search")));
  } catch {
    if (number === latest) results.textContent = "The workbench does not answer; is it still running?";
  }
  if (number === latest) results.setAttribute("aria-busy", "false");
}

const showSoon = debounced(show, 150);
form.addEventListener("input", showSoon);
form.addEventListener("change", show);

// The arrow keys walk from the text to the results and through them

document.addEventListener("keydown", (event) => {
  if (!["ArrowDown", "ArrowUp"].includes(event.key) || event.target.closest("select, [type=radio]")) return;
  const stops = [document.getElementById("q"), ...results.querySelectorAll(".results a")];
  const at = stops.indexOf(document.activeElement);
  const next = stops[at + (event.key === "ArrowDown" ? 1 : -1)];
  if (at < 0 || !next) return;
  event.preventDefault();
  next.focus();
});
