// Opens the contents where they have a column of their own (as wide as in report.css), and draws the charts. Colours are CSS variables, so nothing has to be redrawn for a dark screen or a printer.
const wide = window.matchMedia("(min-width: 68rem)");
const contents = document.querySelector(".toc");
contents.open = wide.matches;
wide.addEventListener("change", () => (contents.open = wide.matches));

const specs = JSON.parse(document.getElementById("charts").textContent);
const options = {
  ast: true, // expressions are interpreted: the page forbids eval
  renderer: "svg",
  actions: false,
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true },
};

for (const holder of document.querySelectorAll("[data-chart]")) {
  try {
    await window.vegaEmbed(holder, specs[holder.dataset.chart], options);
    holder.classList.add("drawn");
  } catch (error) {
    holder.textContent = "This chart could not be drawn here; its numbers are in the table below.";
    console.error(error);
  }
}
document.documentElement.dataset.ready = "yes";
