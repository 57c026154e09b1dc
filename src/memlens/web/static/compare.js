// The page Compare: applies a choice at once and shows a message while the comparison is computed.
const form = document.querySelector(".choose");
const [here, there] = form.querySelectorAll("select");

function go() {
  document.getElementById("main").classList.add("busy");
  form.requestSubmit();
}

form.addEventListener("change", (event) => {
  // a comparison needs both layers or none
  if (event.target === here && (here.value === "") !== (there.value === "")) there.value = here.value;
  if (event.target === there && (here.value === "") !== (there.value === "")) here.value = there.value;
  go();
});
form.addEventListener("submit", () => document.getElementById("main").classList.add("busy"));
window.addEventListener("pageshow", () => document.getElementById("main").classList.remove("busy"));
