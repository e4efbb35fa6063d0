// The rollout browser. Model output is inserted as text, never as markup.
const rollouts = JSON.parse(document.getElementById("rollouts-data").textContent);
const chosen = { step: document.getElementById("step"), colour: document.getElementById("colour"), order: document.getElementById("order"), only: document.getElementById("only") };
const tokenLine = document.getElementById("token");
const MOST_SURPRISE = 5; // nats at which a token gets the full color: probability 1/150

const written = (tag, className, ...content) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
};
const short = (value) => typeof value === "number" ? Number(value.toPrecision(4)) : value;
const signed = (value) => (value > 0 ? "+" : "") + short(value);
const advantageOf = (row, at) => row.advantages ? row.advantages[at] : row.advantage;
const ratioOf = (row, at) => {
  const [before, now] = [row.logprobs?.[at], row.policy_logprobs?.[at]];
  return before == null || now == null ? null : now - before;
};

// Color modes: the required data, the value of a token, the value with full color, and the two colors.
const colourings = {
  advantage: {
    label: "advantage", ends: ["minus", "plus"], limit: (rows) => largest(rows, advantageOf) || 1,
    value: advantageOf, has: (row) => row.advantage != null || row.advantages,
  },
  surprise: {
    label: "log-probability", ends: [null, "rare"], limit: () => MOST_SURPRISE,
    value: (row, at) => row.logprobs?.[at] == null ? null : -row.logprobs[at], has: (row) => row.logprobs,
  },
  ratio: {
    label: "log-probability, policy minus sampler", ends: ["minus", "plus"], limit: (rows) => largest(rows, ratioOf) || 1,
    value: ratioOf, has: (row) => row.logprobs && row.policy_logprobs,
  },
};

function largest(rows, value) {
  let most = 0;
  for (const row of rows) row.tokens.forEach((_, at) => { most = Math.max(most, Math.abs(value(row, at) ?? 0)); });
  return most;
}

function paint(span, colouring, limit, value) {
  if (!colouring || value == null) return;
  const colour = colouring.ends[value >= 0 ? 1 : 0];
  const strength = Math.min(1, Math.abs(value) / limit) * 0.6;
  if (colour && strength > 0.01) span.style.background = `rgba(var(--${colour}), ${strength.toFixed(3)})`;
}

function tokens(row, colouring, limit) {
  const pre = written("pre", "");
  if (!row.pieces) pre.append(row.completion + "\n");
  row.tokens.forEach((id, at) => {
    if (at === row.left_out_at) pre.append(written("span", "gap", ` [... ${row.left_out} tokens omitted ...] `));
    const piece = row.pieces ? row.pieces[at] : [`${id}`];
    const isOutside = Array.isArray(piece);
    const span = written("span", isOutside ? "token outside" : "token", isOutside ? piece[0] : piece);
    span.dataset.at = at;
    paint(span, colouring, limit, colouring?.value(row, at));
    pre.append(span);
  });
  pre.addEventListener("pointerover", (event) => describe(row, event.target));
  pre.addEventListener("click", (event) => describe(row, event.target));
  return pre;
}

function describe(row, span) {
  if (span.dataset.at === undefined) return;
  const at = Number(span.dataset.at), logprob = row.logprobs?.[at], ratio = ratioOf(row, at), advantage = advantageOf(row, at);
  const parts = [`token ${row.tokens[at]} ${JSON.stringify(span.textContent)}`];
  if (logprob != null) parts.push(`log p ${signed(logprob)} (p ${short(Math.exp(logprob))})`);
  if (ratio != null) parts.push(`policy log p ${signed(row.policy_logprobs[at])}, ratio ${short(Math.exp(ratio))}`);
  if (advantage != null) parts.push(`advantage ${signed(advantage)}`);
  tokenLine.textContent = parts.join(" · ");
}

function images(row, thumbnails) {
  const place = written("div", "images");
  for (const [digest, name] of row.images ?? []) {
    const figure = written("figure", "", written("figcaption", "soft", name));
    if (thumbnails?.[digest]) {
      const picture = written("img", "");
      picture.src = thumbnails[digest];
      picture.alt = name;
      figure.prepend(picture);
    }
    place.append(figure);
  }
  return place;
}

const isLong = (row) => row.num_tokens > 48 || row.messages;

function sample(row, colouring, limit) {
  const header = written("header", "", written("span", "", "reward ", written("b", "", row.reward == null ? "not finite" : `${short(row.reward)}`)));
  const say = (text, className) => header.append(written("span", className ?? "", text));
  for (const [name, value] of Object.entries(row.reward_parts ?? {})) say(`${name} ${value == null ? "not finite" : short(value)}`);
  if (row.advantage != null) say(`advantage ${signed(row.advantage)}`);
  say(`${row.num_tokens} tokens`);
  if (row.truncated) say("truncated", "cut");
  if (row.turns > 1) say(`${row.turns} turns`);
  if (row.answer != null) say(`answer ${row.answer}`);
  if (row.expected_answer != null) say(`expected ${row.expected_answer}`);
  if (row.weight_version != null) say(`weights ${row.weight_version}`);
  if (row.staleness != null) say(`staleness ${row.staleness}`);
  const article = written("article", isLong(row) ? "sample long" : "sample", header, tokens(row, colouring, limit));
  if (row.messages) {
    const details = written("details", "", written("summary", "", "conversation"));
    for (const message of row.messages) details.append(written("h3", "soft", message.role), written("pre", "", message.content));
    article.append(details);
  }
  return article;
}

const orders = {
  logged: null,
  worst: (a, b) => a.reward - b.reward,
  best: (a, b) => b.reward - a.reward,
  longest: (a, b) => b.num_tokens - a.num_tokens,
};
const filters = {
  all: () => true,
  mixed: (row, groups) => new Set(groups.get(row.group).map((other) => other.reward)).size > 1,
  truncated: (row) => row.truncated,
};

// Show this many rows at first and the rest on demand, so that the sections below stay reachable.
const ROWS_AT_FIRST = 64;

function atFirst(blocks) {
  let rows = 0;
  return blocks.filter((block) => (rows += block.length) <= Math.max(ROWS_AT_FIRST, blocks[0].length));
}

async function show(every = false) {
  const at = chosen.step.selectedIndex;
  let part;
  try {
    part = rollouts[at].rows ? rollouts[at] : await loadRollouts(rollouts[at]); // live.js
  } catch (error) {
    document.getElementById("counted").textContent = `Step ${rollouts[at].step} could not be loaded: ${error.message}`;
    return;
  }
  if (at !== chosen.step.selectedIndex) return;
  const groups = Map.groupBy ? Map.groupBy(part.rows, (row) => row.group) : grouped(part.rows);
  const colouring = colourings[chosen.colour.value];
  const limit = colouring ? colouring.limit(part.rows) : 1;
  const place = document.getElementById("groups");
  place.replaceChildren();
  const order = orders[chosen.order.value];
  const kept = part.rows.filter((row) => filters[chosen.only.value](row, groups));
  // Sorting separates rows from their groups, so each row shows its prompt.
  const blocks = order ? kept.sort(order).map((row) => [row]) : [...grouped(kept).values()];
  // Prompts with one short sample each are laid out side by side.
  const isNarrow = ([row, ...others]) => !others.length && !isLong(row) && part.prompts[row.group].length < 300;
  place.className = blocks.every(isNarrow) ? "side" : "";
  const visible = every ? blocks : atFirst(blocks);
  for (const rows of visible) {
    const samples = written("div", "samples", ...rows.map((row) => sample(row, colouring, limit)));
    const title = rows[0].task ? `prompt, ${rows[0].task}` : "prompt";
    place.append(written("section", "panel group", written("h3", "soft", title), written("pre", "", part.prompts[rows[0].group]), images(rows[0], part.thumbnails), samples));
  }
  if (visible.length < blocks.length) {
    const more = written("button", "more", `Show ${blocks.length - visible.length} more`);
    more.addEventListener("click", () => show(true));
    place.append(more);
  }
  if (!blocks.length) place.append(written("p", "soft", "No matching rollouts in this step."));
  const of = part.total == null ? "" : ` of ${part.total}`;
  document.getElementById("counted").textContent = `${part.rows.length}${of} rollouts of step ${part.step}`;
  showScale(colouring, limit);
}

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  return groups;
}

function showScale(colouring, limit) {
  const place = document.getElementById("scale");
  place.replaceChildren();
  if (!colouring) return;
  const [low, high] = colouring.ends.map((name) => name ? `rgba(var(--${name}), .6)` : "transparent");
  const strip = written("span", "scale");
  strip.style.background = `linear-gradient(to right, ${low}, transparent ${colouring.ends[0] ? "50%" : "0%"}, ${high})`;
  const text = Number(limit.toPrecision(3));
  const ends = colouring.ends[0] ? [`−${text}`, `+${text}`] : ["0", `−${text}`];
  place.append(`${ends[0]} `, strip, ` ${ends[1]}`);
}

if (rollouts.every((part) => part.rows)) {
  const everyRow = rollouts.flatMap((part) => part.rows);
  for (const option of [...chosen.colour.options]) {
    const colouring = colourings[option.value];
    if (colouring && !everyRow.some(colouring.has)) option.remove();
  }
}
const addStep = (part) => chosen.step.append(written("option", "", `${part.step}`));
rollouts.forEach(addStep);
chosen.step.selectedIndex = rollouts.length - 1;
const move = (by) => {
  chosen.step.selectedIndex = Math.max(0, Math.min(rollouts.length - 1, chosen.step.selectedIndex + by));
  show();
};
document.getElementById("earlier").addEventListener("click", () => move(-1));
document.getElementById("later").addEventListener("click", () => move(1));
for (const control of Object.values(chosen)) control.addEventListener("change", () => show());
show();
