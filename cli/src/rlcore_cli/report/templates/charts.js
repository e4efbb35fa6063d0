// Shows the values of a chart under the pointer. Each svg has its data in `readings`: the x scale and the series.
function showReadings(svg) {
  const { x: [origin, stride], series, of } = JSON.parse(svg.dataset.readings);
  const cursor = svg.querySelector(".cursor");
  let box = null;

  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] < steps[high] - wanted ? low : high;
  };

  const hide = () => {
    cursor.style.visibility = "hidden";
    if (box) box.remove();
    box = null;
  };

  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / bounds.width;
    const wanted = ((event.clientX - bounds.left) * scale - origin) / stride;
    // The recorded step (or second) nearest to the pointer. Curves without that step show their nearest step.
    const hits = series.map(([label, colour, steps, values]) => {
      const at = nearest(steps, wanted);
      return { label, colour, step: steps[at], value: values[at] };
    });
    const step = hits.reduce((best, hit) => Math.abs(hit.step - wanted) < Math.abs(best - wanted) ? hit.step : best, hits[0].step);
    cursor.setAttribute("transform", `translate(${origin + stride * step} 0)`);
    cursor.style.visibility = "visible";
    if (!box) {
      box = document.createElement("div");
      box.className = "reading";
      svg.parentElement.append(box);
    }
    box.replaceChildren(`${of} ${step}`);
    for (const hit of hits) {
      const line = document.createElement("div");
      line.className = `c${hit.colour}`;
      line.append(`${hit.label} ${hit.value}${hit.step === step ? "" : ` (${of} ${hit.step})`}`);
      box.append(line);
    }
    const frame = svg.parentElement.getBoundingClientRect();
    const maxLeft = frame.width - box.offsetWidth - 6;
    box.style.left = `${Math.max(6, Math.min(event.clientX - frame.left + 14, maxLeft))}px`;
    box.style.top = `${bounds.top - frame.top + 12}px`;
  });
  svg.addEventListener("pointerleave", hide);
}
for (const svg of document.querySelectorAll("svg[data-readings]")) showReadings(svg);
