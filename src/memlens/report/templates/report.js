// Draws the charts of the page. Colours are CSS variables, so nothing has to be redrawn for a dark screen or a printer.
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
