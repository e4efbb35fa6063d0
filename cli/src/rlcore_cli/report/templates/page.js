// Filters the config, and reloads a page that is still being updated while keeping the reader's selections.
const filterSettings = () => {
  const wanted = document.getElementById("find").value.toLowerCase();
  const onlyWritten = document.getElementById("written")?.checked ?? false;
  for (const row of document.querySelectorAll("#settings tr")) {
    const isDefault = row.dataset.kind === "default";
    row.hidden = (onlyWritten && isDefault && !wanted) || !row.textContent.toLowerCase().includes(wanted);
  }
};
if (document.getElementById("find")) {
  for (const id of ["find", "written"]) document.getElementById(id)?.addEventListener("input", filterSettings);
  filterSettings();
}

const seconds = Number(document.body.dataset.reload);
if (seconds > 0) {
  const kept = JSON.parse(sessionStorage.getItem("kept") ?? "null");
  if (kept) {
    for (const [id, value] of Object.entries(kept.values)) {
      const control = document.getElementById(id);
      if (control && value !== null) control.value = value;
    }
    document.getElementById("step")?.dispatchEvent(new Event("change"));
    scrollTo(0, kept.scroll);
  }
  setTimeout(() => {
    const values = {};
    const step = document.getElementById("step");
    for (const id of ["colour", "order", "only"]) values[id] = document.getElementById(id)?.value ?? null;
    // A reader who views the newest step keeps following it.
    values.step = step && step.selectedIndex < step.options.length - 1 ? step.value : null;
    sessionStorage.setItem("kept", JSON.stringify({ values, scroll: scrollY }));
    location.reload();
  }, seconds * 1000);
}
