"use strict";
// Moves thresholds over the documents of a preview. What documents say is set as text, never as markup.

function failing(statistics, thresholds) {
  return thresholds.filter((rule) => {
    const value = statistics[rule.key];
    return value !== undefined && (rule.side === "least" ? value < rule.limit : value > rule.limit);
  });
}

function judge(documents, thresholds) {
  return documents.map((each) => {
    const failed = failing(each.statistics, thresholds);
    return { each, failed, kept: failed.length === 0 && each.fixed.length === 0 };
  });
}

function overrides(thresholds) {
  return thresholds.filter((rule) => rule.limit !== rule.given && rule.set).map((rule) => `--set ${rule.set}=${rule.limit}`);
}

function range(rule, documents) {
  const values = documents.map((each) => each.statistics[rule.key]).filter((value) => value !== undefined);
  const low = Math.min(rule.limit, ...values);
  const high = Math.max(rule.limit, ...values);
  const whole = [rule.limit, ...values].every(Number.isInteger);
  return { low, high, step: whole ? 1 : (high - low) / 200 || 0.01 };
}

function name(rule) {
  const setting = rule.set ? rule.set.split(".").pop() : rule.statistic;
  return `${rule.filter}: ${setting}`;
}

function show(page, data) {
  const thresholds = data.thresholds.map((rule) => ({ ...rule, given: rule.limit }));
  const element = (kind, text, className) => {
    const made = page.createElement(kind);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const at = (id) => page.getElementById(`preview-${id}`);
  const rows = thresholds.map((rule) => {
    const { low, high, step } = range(rule, data.documents);
    const row = element("tr");
    const slider = element("input");
    Object.assign(slider, { type: "range", min: low, max: high, step, value: rule.limit });
    const limit = element("td", "", "number");
    const dropped = element("td", "", "number");
    slider.addEventListener("input", () => {
      const moved = Number(slider.value);
      rule.limit = Math.abs(moved - rule.given) < step / 2 ? rule.given : Number(moved.toPrecision(6));
      refresh();
    });
    const cell = element("td");
    cell.append(slider);
    row.append(element("td", name(rule)), element("td", rule.side === "least" ? "at least" : "at most"), cell, limit, dropped);
    at("thresholds").append(row);
    return { rule, limit, dropped };
  });
  const items = data.documents.map((each) => {
    const item = element("details");
    const summary = element("summary");
    const badge = element("span", "", "badge");
    const reasons = element("span", "", "count");
    summary.append(badge, ` ${each.id} `, reasons);
    item.append(summary, element("p", each.source, "note"), element("pre", each.text));
    at("documents").append(item);
    return { item, badge, reasons };
  });
  function refresh() {
    const judged = judge(data.documents, thresholds);
    rows.forEach(({ rule, limit, dropped }) => {
      limit.textContent = String(rule.limit);
      dropped.textContent = String(judged.filter(({ failed }) => failed.includes(rule)).length);
    });
    judged.forEach(({ each, failed, kept }, number) => {
      const { item, badge, reasons } = items[number];
      badge.textContent = kept ? "kept" : "dropped";
      badge.className = kept ? "badge good" : "badge bad";
      reasons.textContent = [...each.fixed, ...failed.map((rule) => `${name(rule)} (${each.statistics[rule.key]})`)].join(", ");
      item.hidden = kept && at("only-dropped").checked;
    });
    at("kept").textContent = `${judged.filter(({ kept }) => kept).length} of ${judged.length} documents are kept`;
    at("overrides").textContent = overrides(thresholds).join(" \\\n  ") || "no threshold was moved";
  }
  at("only-dropped").addEventListener("change", refresh);
  refresh();
}

if (typeof module !== "undefined") module.exports = { failing, judge, overrides, range, show };
else show(document, JSON.parse(document.getElementById("preview-data").textContent));
