// Filters the config.
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
