(() => {
  "use strict";
  const root = document.currentScript.closest(".nagnet-tokens");
  const models = JSON.parse(root.querySelector(".data").textContent);
  const MODES = {
    confidence: "exp(s_N); deeper is more confident",
    loss: "nats of loss; deeper was predicted worse",
    entropy: "nats of entropy; deeper is less sure",
  };

  const count = (n) => n.toLocaleString("en");

  const number = (x) => {
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2);
    return size >= 1000 ? count(Math.round(x)) : x.toPrecision(3);
  };

  const element = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  const drawn = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // A token as a part of a line: its marks say where it had line ends and tabs.
  const inline = (text) => text.replace(/[\n\t]/g, "");

  // The place of a value between the ends of its colour scale, 0 to 1; halfway where all values are the same.
  const share = (model, mode, index) => {
    const [low, high] = model.scales[mode];
    return low === high ? 0.5 : Math.min(1, Math.max(0, (model[mode][index] - low) / (high - low)));
  };

  const build = (model, article) => {
    const text = article.querySelector(".text");
    const tokens = model.text.map((piece, index) => {
      const token = element("span", { textContent: piece, tabIndex: -1 });
      token.setAttribute("role", "option");
      if (index > 0 && model.window_starts.includes(index)) token.className = "window";
      const values = `probability ${number(model.probability[index])}, loss ${number(model.loss[index])} nats`;
      const name = `token ${index + 1}: ${inline(piece)}, ${values}, confidence ${number(model.confidence[index])}`;
      token.setAttribute("aria-label", token.className ? `${name}; the context begins anew` : name);
      token.setAttribute("aria-selected", "false");
      return token;
    });
    text.append(...tokens);
    return { model, article, text, tokens, chosen: 0 };
  };

  const paint = (view, mode) => {
    const [low, high] = view.model.scales[mode];
    const field = (name) => view.article.querySelector(`.scale .${name}`);
    view.tokens.forEach((token, index) => token.style.setProperty("--share", share(view.model, mode, index)));
    field("low").textContent = low === high ? "all" : `${low > 0 ? "≤ " : ""}${number(low)}`;
    field("high").textContent = low === high ? number(low) : `≥ ${number(high)}`;
    field("unit").textContent = MODES[mode];
  };

  const ticks = (low, high) => {
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    return found.map((value) => [value, value.toFixed(decimals).replace("-", "−")]);
  };

  // s by depth as one line: the writes of attention thick, those of the MLP thin; below it which sublayers ran.
  const chart = (model, index) => {
    const values = model.log_norm[index];
    const updates = values.length - 1;
    const [width, left, right, top, bottom] = [400, 66, 386, 24, 150];
    const low = Math.min(model.log_norm_range[0], ...values);
    const high = Math.max(model.log_norm_range[1], ...values, low + 0.01);
    const x = (l) => left + ((right - left) * l) / updates;
    const y = (s) => bottom - ((bottom - top) * (s - low)) / (high - low);
    const rows = model.ran ? 31 : 0;
    const label = `s by depth: ${number(values[0])} before the first update, ${number(values[updates])} after the last`;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${bottom + rows + 36}`, role: "img", "aria-label": label });
    const add = (tag, attributes, text) => svg.append(drawn(tag, attributes, text));
    for (const [value, name] of ticks(low, high)) {
      add("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
      add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, name);
    }
    add("text", { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "s, ln of stream RMS");
    const middle = updates > 1 ? [Math.round(updates / 2)] : [];
    for (const l of [0, ...middle, updates]) {
      add("text", { x: x(l), y: bottom + rows + 15, "text-anchor": "middle" }, l);
    }
    add("text", { x: (left + right) / 2, y: bottom + rows + 31, "text-anchor": "middle" }, "update l (attention, then MLP of each block)");
    const line = (points) => points.map(([l, s], i) => `${i ? "L" : "M"}${x(l).toFixed(1)} ${y(s).toFixed(1)}`).join("");
    add("path", { class: "mean", d: line(model.mean_log_norm.map((s, l) => [l, s])) });
    ["attention", "mlp"].forEach((name, sublayer) => {
      let path = "";
      for (let l = 1 + sublayer; l <= updates; l += 2) path += line([[l - 1, values[l - 1]], [l, values[l]]]);
      add("path", { class: name, d: path });
      const row = bottom + 5 + 13 * sublayer;
      if (model.ran) add("text", { x: left - 6, y: row + 9, "text-anchor": "end" }, ["attention", "MLP"][sublayer]);
      for (let l = 1 + sublayer; model.ran && l <= updates; l += 2) {
        const run = model.ran[index][l - 1] === "1";
        add("rect", { class: run ? "cell run" : "cell", x: x(l - 1) + 0.5, y: row, width: x(1) - x(0) - 1, height: 9 });
      }
      add("path", { class: name, d: `M${left + 95 * sublayer} 10h22` });
      add("text", { x: left + 28 + 95 * sublayer, y: 14 }, ["attention", "MLP"][sublayer]);
    });
    add("path", { class: "mean", d: `M${left + 168} 10h22` });
    add("text", { x: left + 196, y: 14 }, "mean of this text");
    add("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` });
    return svg;
  };

  const sublayers = (model, index) => {
    const updates = model.log_norm[index].length - 1;
    if (!model.ran) return `all ${updates} ran; it skips none`;
    const run = [...model.ran[index]].filter((bit) => bit === "1").length;
    return `${run} of ${updates} ran; others scored ≤ ${number(model.skip_threshold)}`;
  };

  const describe = (view, index) => {
    const { model, article } = view;
    const put = (name, ...content) => article.querySelector(`dd.${name}`).replaceChildren(...content);
    const names = ["token", "probability", "rank", "loss", "entropy", "likeliest", "confidence", "ran"];
    if (index < 0) {
      names.forEach((name) => put(name, name === "token" ? "beyond the part of the text that is shown here" : "–"));
      article.querySelector(".chart").replaceChildren();
      return;
    }
    const bytes = model.split[index] ? `, split: bytes ${model.split[index]}` : "";
    put("token", element("code", { textContent: inline(model.text[index]) }), ` ${count(index + 1)} of ${count(model.text.length)}${bytes}`);
    put("probability", number(model.probability[index]));
    put("rank", `${count(model.rank[index])} of ${count(model.vocab_size)}`);
    put("loss", `${number(model.loss[index])} nats`);
    put("entropy", `${number(model.entropy[index])} nats`);
    const probability = ` probability ${number(model.max_probability[index])}`;
    put("likeliest", element("code", { textContent: inline(model.likeliest[index]) }), probability);
    put("confidence", `exp(s_N) = ${number(model.confidence[index])}${model.scale_in_logits ? "" : " (control)"}`);
    put("ran", sublayers(model, index));
    article.querySelector(".chart").replaceChildren(chart(model, index));
  };

  const choose = (view, index) => {
    if (view.chosen >= 0) {
      view.tokens[view.chosen].setAttribute("aria-selected", "false");
      view.tokens[view.chosen].tabIndex = -1;
    }
    view.chosen = index;
    view.tokens[Math.max(0, index)].tabIndex = 0;
    if (index >= 0) view.tokens[index].setAttribute("aria-selected", "true");
    describe(view, index);
  };

  // The token of another model that holds this byte of the text; -1 beyond what it shows.
  const holder = (model, byte) => (byte < model.end ? model.starts.findLastIndex((start) => start <= byte) : -1);

  const select = (view, index) => {
    if (view.chosen === index && view.tokens[index].getAttribute("aria-selected") === "true") return;
    for (const other of views) {
      choose(other, other === view ? index : holder(other.model, view.model.starts[index]));
      const token = other.tokens[other.chosen];
      const hidden = token && (token.offsetTop < other.text.scrollTop || token.offsetTop > other.text.scrollTop + other.text.clientHeight - 24);
      if (other !== view && hidden) other.text.scrollTop = token.offsetTop - other.text.clientHeight / 2;
    }
  };

  // The token nearest in the line above (step -1) or below (1).
  const vertical = (view, index, step) => {
    const place = (i) => view.tokens[i].getClientRects()[0];
    const from = place(index);
    let best = index;
    let line = null;
    for (let i = index + step; i >= 0 && i < view.tokens.length; i += step) {
      const now = place(i);
      if (!now || Math.abs(now.top - from.top) < 3) continue;
      line ??= now.top;
      if (Math.abs(now.top - line) > 3) break;
      if (best === index || Math.abs(now.left - from.left) < Math.abs(place(best).left - from.left)) best = i;
    }
    return best;
  };

  const moved = (view, key, index) => {
    const last = view.tokens.length - 1;
    const found = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[key];
    if (key === "ArrowUp" || key === "ArrowDown") return vertical(view, index, key === "ArrowUp" ? -1 : 1);
    return found === undefined ? null : Math.min(last, Math.max(0, found));
  };

  const articles = root.querySelectorAll(".model");
  const views = models.map((model, index) => build(model, articles[index]));
  for (const view of views) {
    // Not pointerover: that comes too where keys scroll the text below a pointer at rest.
    view.text.addEventListener("pointermove", (event) => {
      const index = view.tokens.indexOf(event.target);
      if (index >= 0) select(view, index);
    });
    view.text.addEventListener("focusin", (event) => select(view, view.tokens.indexOf(event.target)));
    view.text.addEventListener("keydown", (event) => {
      const index = moved(view, event.key, Math.max(0, view.tokens.indexOf(event.target)));
      if (index === null || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      view.tokens[index].focus();
    });
  }
  const form = root.querySelector("form");
  const apply = () => {
    const { mode, theme } = Object.fromEntries(new FormData(form));
    root.dataset.mode = mode;
    root.dataset.theme = theme;
    views.forEach((view) => paint(view, mode));
  };
  form.addEventListener("change", apply);
  apply();
  select(views[0], 0);
})();
