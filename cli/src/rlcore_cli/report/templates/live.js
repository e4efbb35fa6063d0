// Keeps the page of `rlcore watch` current: asks for the state of the run, and for new charts if there are new data.
const text = (id, content) => { document.getElementById(id).textContent = content; };

// The rollouts of a step are sent when it is shown first.
async function loadRollouts(part) {
  const reply = await fetch(`rollouts/${part.step}`);
  if (!reply.ok) throw new Error(await reply.text());
  return Object.assign(part, await reply.json());
}

async function replaceCharts() {
  const page = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
  const fresh = page.getElementById("rollouts-data"), shown = document.getElementById("rollouts-data");
  const isOpen = document.querySelector("#curves details")?.open ?? false;
  for (const selector of [".top", "#curves"]) document.querySelector(selector).replaceWith(document.adoptNode(page.querySelector(selector)));
  const details = document.querySelector("#curves details");
  if (details) details.open = isOpen;
  document.querySelectorAll("svg[data-readings]").forEach(showReadings);
  if (!fresh !== !shown) location.reload();
  if (fresh && shown) addSteps(JSON.parse(fresh.textContent));
  document.body.dataset.version = page.body.dataset.version;
}

function addSteps(parts) {
  const isNewest = chosen.step.selectedIndex === rollouts.length - 1;
  const last = rollouts.at(-1).step;
  if (parts.at(-1).step < last) location.reload(); // a resumed run repeats steps
  const added = parts.filter((part) => part.step > last);
  rollouts.push(...added);
  added.forEach(addStep);
  // A reader who views the newest step keeps following it.
  if (added.length && isNewest) move(added.length);
}

async function update() {
  try {
    const state = await (await fetch("state")).json();
    if (state.run !== document.body.dataset.run) return location.reload();
    if (state.version !== document.body.dataset.version) await replaceCharts();
    text("state", state.state);
    document.getElementById("state").className = `badge ${state.state}`;
    text("sentence", state.sentence);
    text("progress", state.progress);
    const log = document.getElementById("log-text"), isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    if (log.textContent !== state.log) log.textContent = state.log;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  } catch (error) {
    text("progress", `Not updated: ${error.message}. Is \`rlcore watch\` still running?`);
  }
  setTimeout(update, 1000 * Number(document.body.dataset.every));
}
addEventListener("DOMContentLoaded", update);
