const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const light_colours = ["#3b6fb6", "#c2571a", "#2c8a57", "#8c4fb0", "#b03a5b", "#7a6a17", "#2a8c96", "#5b5b5b"];
const dark_colours = ["#7fb0f0", "#f0a35e", "#6fce9a", "#c79ae6", "#ee8aa5", "#d3c25a", "#6fd0da", "#b5b5b5"];

function colour(i) {
  const palette = dark.matches ? dark_colours : light_colours;
  return palette[i % palette.length];
}

function parts(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function faint(hex) {
  return `rgba(${parts(hex)},0.16)`;
}

function on_card(hex, share) {  // opaque, so that a label on it is drawn in a colour that stands out
  const card = parts(getComputedStyle(document.documentElement).getPropertyValue("--card").trim());
  return `rgb(${parts(hex).map((value, i) => Math.round(card[i] + share * (value - card[i])))})`;
}

function layout(extra) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, linecolor: line, zeroline: false, ticks: "outside", tickcolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 14, t: 34, b: 46 },
    font: { color: ink, size: 13, family: getComputedStyle(document.body).fontFamily },
    hovermode: "closest", showlegend: data.methods.length <= 5,  // else the squares in the table are the legend
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
    ...extra, xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}

function log_axis(which, key) {
  const values = data.methods.flatMap((method) => method[which]?.[key] ?? []).filter((value) => value > 0);
  if (!values.length) return { type: "log" };
  const low = Math.min(...values), high = Math.max(...values);
  const factors = high / low > 200 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of factors) ticks.push(Number((factor * 10 ** power).toPrecision(1)));
  }
  const room = 0.03 * Math.log10(high / low) + 0.01;
  return {
    type: "log", tickvals: ticks, ticktext: ticks.map((value) => value.toLocaleString("en", { maximumFractionDigits: 8 })),
    range: [Math.log10(low) - room, Math.log10(high) + room],
  };
}

function lines(which) {
  return data.methods.flatMap((method, i) => {
    const curve = method[which], tint = colour(i), group = method.spec;
    if (!curve) return [];
    const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: group };
    return [
      { ...edge, x: curve.x, y: curve.high },
      { ...edge, x: curve.x, y: curve.low, fill: "tonexty", fillcolor: faint(tint) },
      { x: curve.x, y: curve.y, name: group, legendgroup: group, line: { color: tint, width: 2, dash: i < light_colours.length ? "solid" : "dash" },
        mode: tested.includes(which) ? "lines+markers" : "lines", marker: { size: 5 },
        connectgaps: which === "consensus_by_step" },
    ];
  });
}
