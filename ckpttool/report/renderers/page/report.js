// The HTML report: a tree of every key, that is searched, filtered and folded. It runs on what the page holds, sets texts
// as texts only, and makes elements of no more rows than are seen, so that a hundred thousand keys are no burden.
"use strict";

const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const number = (n) => n.toLocaleString("en");
const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

function bytes(n) {
  if (n < 1024) return plural(n, "byte");
  const power = Math.min(Math.floor(Math.log2(n) / 10), 6);
  return `${(n / 1024 ** power).toFixed(1)} ${" KMGTPE"[power]}iB`;
}

// The page without the tree: theme, commands that can be copied

function setUpTheme() {
  const themes = ["system", "light", "dark"];
  const button = element("button", { type: "button", onclick: () => show(themes[(themes.indexOf(chosen) + 1) % 3]) });
  let chosen;
  const show = (theme) => {
    chosen = theme;
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    try { localStorage.setItem("ckpttool-theme", theme); } catch { /* a page without storage forgets it */ }
  };
  let before = null;
  try { before = localStorage.getItem("ckpttool-theme"); } catch { /* as above */ }
  show(themes.includes(before) ? before : "system");
  document.querySelector("header").append(button);
}

function setUpCopying() {
  for (const code of document.querySelectorAll(".code")) {
    const copy = async () => {
      getSelection().selectAllChildren(code.querySelector("pre"));
      try {
        await navigator.clipboard.writeText(code.querySelector("pre").textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    const button = element("button", { type: "button", onclick: copy }, "Copy");
    code.append(button);
  }
}

// Leaves and modules. A finding is [status, why, left keys, left outlines, right keys, right outlines, detail, spread];
// 0 for the right side says that it is as the left one, and what is empty at the end is left out.

function findings(data) {
  return data.rows.map(([status, why, left, leftOutlines, right = 0, rightOutlines = 0, detail = "", spread = []]) => {
    const outlined = (keys, outlines) => keys.map((key, at) => [key, ...data.outlines[outlines[at]]]);
    const sides = [outlined(left, leftOutlines), outlined(right || left, rightOutlines || leftOutlines)];
    const text = [...left, ...(right || [])].join("\n").toLowerCase();
    return { status, why: data.whys[why], sides: data.sides.length > 1 ? sides : sides.slice(0, 1), detail, spread, text };
  });
}

class Node {
  constructor(name, parent, finding = null, outline = null) {
    Object.assign(this, { name, parent, finding, outline, open: false, children: [], modules: null });
    this.leaves = this.bytes = this.shown = 0;
    this.found = null; // of each status, how many leaves are shown
  }

  get depth() {
    let depth = -1;
    for (let node = this.parent; node; node = node.parent) depth += 1;
    return depth;
  }

  get path() {
    if (this.finding) return this.outline[0];
    return this.parent && this.parent.parent ? `${this.parent.path}.${this.name}` : this.name;
  }

  module(name) {
    this.modules ??= new Map();
    if (!this.modules.has(name)) {
      const made = new Node(name, this);
      this.modules.set(name, made);
      this.children.push(made);
    }
    return this.modules.get(name);
  }

  *below() {
    if (this.finding) yield this;
    else for (const child of this.children) yield* child.below();
  }
}

function grow(all, side) {
  const root = new Node("", null);
  const leaves = [];
  for (const finding of all) {
    const own = finding.sides[side].length ? finding.sides[side] : finding.sides[1 - side];
    for (const outline of own) {
      const path = outline[0].split(".");
      let node = root;
      for (const name of path.slice(0, -1)) node = node.module(name);
      const leaf = new Node(path[path.length - 1], node, finding, outline);
      node.children.push(leaf);
      leaves.push(leaf);
      for (let at = leaf; at; at = at.parent) {
        at.leaves += 1;
        at.bytes += outline[3] ?? 0;
      }
    }
  }
  join(root);
  return { root, leaves };
}

// A module that holds one module and nothing else is one row with it; layers stand in the order of their numbers.
function join(node) {
  if (node.children.every((child) => /^\d+$/.test(child.name))) node.children.sort((a, b) => a.name - b.name);
  for (const [at, child] of node.children.entries()) {
    let inner = child;
    while (inner.children.length === 1 && !inner.children[0].finding) {
      inner.children[0].name = `${inner.name}.${inner.children[0].name}`;
      inner = inner.children[0];
    }
    inner.parent = node;
    node.children[at] = inner;
    join(inner);
  }
}

// The browser

class Browser {
  constructor(data) {
    this.data = data;
    this.findings = findings(data);
    this.hidden = new Set(data.statuses.flatMap(([, , quiet], at) => (quiet ? [at] : [])));
    this.dtypes = new Set();
    this.words = [];
    this.folded = new Set(); // what was folded by hand in what a search has opened
    this.first = 0;
    this.count = data.statuses.map(() => 0);
    for (const finding of this.findings) this.count[finding.status] += 1;
    this.build();
    this.plant(data.sides.length - 1);
  }

  build() {
    this.search = element("input", {
      type: "search", placeholder: "Search keys  ( / )", "aria-label": "Search keys", autocomplete: "off", spellcheck: "false",
      oninput: () => this.find(), onkeydown: (event) => this.keyInSearch(event),
    });
    this.said = element("output", { "aria-live": "polite" });
    this.tree = element("div", {
      id: "tree", role: "treegrid", tabindex: "0", "aria-label": "Keys by module", onkeydown: (event) => this.key(event),
      onscroll: () => this.paint(), onclick: (event) => this.click(event), ondblclick: () => this.toggle(this.active),
    });
    this.details = element("aside", {
      id: "details", tabindex: "-1", "aria-label": "Details", onkeydown: (event) => event.key === "Escape" && this.tree.focus(),
    });
    const heads = [["name", "key"], ["what", "status"], ["dtype", "dtype"], ["shape", "shape"], ["size", "size"]];
    const head = element("div", { class: "head", "aria-hidden": "true" },
      ...heads.map(([name, title]) => element("span", { class: name === "what" ? name : "" }, title)));
    const keys = element("p", { class: "keys" });
    keys.append(...[["/", "search"], ["↑ ↓", "move"], ["← →", "fold"], ["Enter", "details"], ["Esc", "back"]]
      .flatMap(([key, what]) => [element("kbd", {}, key), ` ${what}   `]));
    const place = $("browser");
    place.classList.toggle("one-sided", this.data.sides.length === 1);
    place.replaceChildren(
      element("h2", {}, "Every key"),
      element("div", { class: "controls" }, this.search, this.sideButton(), this.button("Unfold all", true), this.button("Fold all", false)),
      element("div", { class: "controls", role: "group", "aria-label": "Show" }, ...this.statusChips(), ...this.dtypeChips(), this.said),
      element("div", { class: "browser" }, element("div", {}, head, this.tree, keys), this.details),
    );
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName) && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        this.search.focus();
        this.search.select();
      }
    });
    addEventListener("resize", () => this.paint());
  }

  sideButton() {
    if (this.data.sides.length === 1 || !this.findings.some((finding) => finding.sides[0].length && finding.sides[1].length
      && finding.sides[0][0][0] !== finding.sides[1][0][0])) return null;
    this.namesOf = element("button", { type: "button", onclick: () => this.plant(1 - this.side) });
    return this.namesOf;
  }

  button(title, open) {
    return element("button", { type: "button", onclick: () => this.foldAll(open) }, title);
  }

  chip(title, kind, count, pressed, toggle) {
    const chip = element("button", { type: "button", class: `chip ${kind}`, "aria-pressed": String(pressed) },
      title, element("i", {}, number(count)));
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(toggle()));
      this.refresh();
    });
    return chip;
  }

  statusChips() {
    if (this.data.sides.length === 1) return [];
    return this.data.statuses.map(([name, role], at) => this.chip(name, `is-${role}`, this.count[at], !this.hidden.has(at),
      () => (this.hidden.delete(at) ? true : (this.hidden.add(at), false))));
  }

  dtypeChips() {
    const count = new Map();
    for (const finding of this.findings) {
      finding.dtypes = new Set(finding.sides.flat().map(([, dtype]) => dtype).filter(Boolean));
      for (const dtype of finding.dtypes) count.set(dtype, (count.get(dtype) ?? 0) + 1);
    }
    if (count.size < 2) return [];
    return [...count].sort((a, b) => b[1] - a[1]).map(([dtype, n]) => this.chip(dtype, "facet is-dtype", n, false,
      () => (this.dtypes.delete(dtype) ? false : (this.dtypes.add(dtype), true))));
  }

  plant(side) {
    this.side = side;
    Object.assign(this, grow(this.findings, side));
    if (this.namesOf) this.namesOf.textContent = `Names of: ${["left", "right"][side]}`;
    this.active = null;
    this.refresh();
    this.openSome();
    this.flatten();
  }

  // What is shown

  find() {
    this.words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.folded.clear();
    this.refresh();
    this.tree.scrollTop = 0;
  }

  matches(finding) {
    return !this.hidden.has(finding.status)
      && (!this.dtypes.size || [...finding.dtypes].some((dtype) => this.dtypes.has(dtype)))
      && this.words.every((word) => finding.text.includes(word));
  }

  refresh() {
    const clear = (node) => {
      node.shown = 0;
      node.found = this.data.statuses.map(() => 0);
      node.children.forEach(clear);
    };
    clear(this.root);
    for (const leaf of this.leaves) {
      if (!this.matches(leaf.finding)) continue;
      for (let at = leaf; at; at = at.parent) {
        at.shown += 1;
        at.found[leaf.finding.status] += 1;
      }
    }
    this.said.textContent = `${number(this.root.shown)} of ${plural(this.root.leaves, "key")}`;
    this.flatten();
  }

  openSome(rows = 120) {
    let level = [this.root], shown = 0;
    while (level.length) {
      const next = level.flatMap((node) => node.children.filter((child) => child.shown));
      shown += next.length;
      if (shown > rows && level[0] !== this.root) return;
      for (const node of level) node.open = true;
      level = next.filter((node) => !node.finding);
    }
  }

  foldAll(open) {
    const set = (node) => { node.open = open; node.children.forEach(set); };
    this.root.children.forEach(set);
    this.folded.clear();
    if (!open && this.words.length) this.root.children.forEach((node) => this.folded.add(node));
    this.flatten();
  }

  isOpen(node) {
    return this.words.length ? !this.folded.has(node) : node.open;
  }

  flatten() {
    this.rows = [];
    const walk = (node, depth) => {
      for (const child of node.children) {
        if (!child.shown) continue;
        this.rows.push([child, depth]);
        if (!child.finding && this.isOpen(child)) walk(child, depth + 1);
      }
    };
    walk(this.root, 0);
    if (!this.active || !this.rows.some(([node]) => node === this.active)) this.active = this.rows.length ? this.rows[0][0] : null;
    this.height = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
    this.paint();
    this.describe();
  }

  // Elements of the rows that are seen

  paint() {
    const height = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
    this.height = height;
    const from = Math.max(0, Math.floor(this.tree.scrollTop / height) - 8);
    const to = Math.min(this.rows.length, from + Math.ceil(Math.max(this.tree.clientHeight, 400) / height) + 16);
    const space = element("div", { role: "presentation" });
    space.style.height = `${Math.max(this.rows.length, 1) * height}px`;
    for (let at = from; at < to; at += 1) space.append(this.row(at));
    if (!this.rows.length) space.append(element("div", { class: "row dim" }, "No key is like this."));
    this.tree.replaceChildren(space);
    this.tree.setAttribute("aria-rowcount", this.rows.length);
    const active = this.rows.findIndex(([node]) => node === this.active);
    if (active >= from && active < to) this.tree.setAttribute("aria-activedescendant", `row-${active}`);
    else this.tree.removeAttribute("aria-activedescendant");
  }

  row(at) {
    const [node, depth] = this.rows[at];
    const isModule = !node.finding;
    const open = isModule && this.isOpen(node);
    const made = element("div", {
      class: "row", id: `row-${at}`, role: "row", "aria-rowindex": at + 1, "aria-level": depth + 1, "data-at": at,
      "aria-expanded": isModule ? String(open) : null, "aria-selected": String(node === this.active), "--depth": depth,
    }, this.name(node, isModule, open), this.what(node), ...this.geometry(node), this.size(node));
    made.style.transform = `translateY(${at * this.height}px)`;
    return made;
  }

  name(node, isModule, open) {
    const cell = element("span", { class: "name key", role: "gridcell", title: node.path },
      element("span", { class: "twisty", "aria-hidden": "true" }, isModule ? (open ? "▾" : "▸") : ""), this.marked(node.name));
    if (isModule) cell.append(element("span", { class: "count" }, number(node.shown)));
    else {
      const other = (node.finding.sides[1 - this.side] ?? []).map(([key]) => key).join(" + ");
      if (other && other !== node.path) cell.append(element("span", { class: "other" }, `${this.side ? "←" : "→"} ${other}`));
    }
    return cell;
  }

  marked(name) {
    const label = element("span", { class: "label" });
    const word = this.words.find((one) => name.toLowerCase().includes(one));
    const at = word === undefined ? -1 : name.toLowerCase().indexOf(word);
    if (at < 0) label.append(name);
    else label.append(name.slice(0, at), element("mark", {}, name.slice(at, at + word.length)), name.slice(at + word.length));
    return label;
  }

  what(node) {
    const cell = element("span", { class: "what", role: "gridcell" });
    if (this.data.sides.length === 1) return cell;
    const isModule = !node.finding;
    node.found.forEach((count, at) => {
      const [name, role] = this.data.statuses[at];
      if (count) cell.append(element("span", { class: `badge is-${role}` }, isModule ? `${number(count)} ${name}` : name));
    });
    if (node.finding && node.finding.spread.length) cell.append(spreadOf(node.finding.spread, 72, 16));
    return cell;
  }

  geometry(node) {
    const sides = node.finding ? node.finding.sides.filter((side) => side.length).map((side) => side[0]) : [];
    return ["dtype", "shape"].map((name, at) => {
      const texts = [...new Set(sides.map((outline) => outline[at + 1]))];
      return element("span", { class: name, role: "gridcell", title: texts.join(" → ") }, texts.join(" → "));
    });
  }

  size(node) {
    const known = node.finding ? node.outline[3] !== null : node.bytes;
    const share = node.parent.bytes ? node.bytes / node.parent.bytes : 0;
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    return element("span", { class: "size", role: "gridcell" }, element("b", {}, known ? bytes(node.bytes) : ""),
      known ? element("span", { class: "track", title: `${(100 * share).toFixed(1)} % of what is around it` }, bar) : null);
  }

  // Details of the row that is chosen

  describe() {
    const node = this.active;
    this.details.hidden = !node;
    if (node) this.details.replaceChildren(...(node.finding ? this.ofFinding(node) : this.ofModule(node)));
  }

  ofFinding({ finding, path }) {
    const [name, role] = this.data.statuses[finding.status];
    const parts = [element("h3", { class: "key" }, path)];
    if (finding.sides.length > 1) parts.push(element("p", {}, element("span", { class: `badge is-${role}` }, name), finding.why ? `  ${finding.why}` : ""));
    else if (finding.why) parts.push(element("p", {}, finding.why));
    if (finding.detail) parts.push(element("p", {}, finding.detail));
    finding.sides.forEach((side, at) => {
      if (finding.sides.length > 1) parts.push(element("h4", {}, ["left", "right"][at]));
      if (!side.length) parts.push(element("p", { class: "dim" }, "-"));
      for (const [key, dtype, shape, size] of side) {
        parts.push(element("p", {}, element("span", { class: "key" }, key)), element("p", {}, element("span", { class: "dtype" }, dtype), " ",
          element("span", { class: "shape" }, shape), size === null ? "" : `  ${bytes(size)}`));
      }
    });
    if (finding.spread.length) parts.push(...histogram(finding.spread));
    return parts;
  }

  ofModule(node) {
    const parts = [element("h3", { class: "key" }, node.path), element("p", {}, `${plural(node.leaves, "key")}, ${bytes(node.bytes)}`)];
    const dtypes = new Map(), spread = new Map(), statuses = this.data.statuses.map(() => 0);
    for (const leaf of node.below()) {
      const [, dtype, , size] = leaf.outline;
      statuses[leaf.finding.status] += 1;
      if (dtype) dtypes.set(dtype, (dtypes.get(dtype) ?? 0) + (size ?? 0));
      for (const [exponent, count] of leaf.finding.spread) spread.set(exponent, (spread.get(exponent) ?? 0) + count);
    }
    if (this.data.sides.length > 1) {
      const counts = statuses.flatMap((count, at) => (count ? [[this.data.statuses[at][0], count, number(count), this.data.statuses[at][1]]] : []));
      parts.push(element("h4", {}, "keys"), bars(counts));
    }
    const sized = (pairs, role) => bars(pairs.sort((a, b) => b[1] - a[1]).slice(0, 12).map(([name, size]) => [name, size, bytes(size), role]));
    if (dtypes.size) parts.push(element("h4", {}, "bytes by dtype"), sized([...dtypes], "dtype"));
    const inside = node.children.filter((child) => child.bytes).map((child) => [child.name, child.bytes]);
    if (inside.length > 1) parts.push(element("h4", {}, "bytes inside"), sized(inside, "plain"));
    if (spread.size) parts.push(...histogram([...spread].sort((a, b) => a[0] - b[0])));
    return parts;
  }

  // Keyboard and mouse

  choose(at, scroll = true) {
    if (!this.rows.length) return;
    const to = Math.min(Math.max(at, 0), this.rows.length - 1);
    this.active = this.rows[to][0];
    if (scroll) {
      const top = to * this.height, bottom = top + this.height;
      if (top < this.tree.scrollTop) this.tree.scrollTop = top;
      else if (bottom > this.tree.scrollTop + this.tree.clientHeight) this.tree.scrollTop = bottom - this.tree.clientHeight;
    }
    this.paint();
    this.describe();
  }

  toggle(node, open = !this.isOpen(node)) {
    if (!node || node.finding) return;
    node.open = open;
    if (open) this.folded.delete(node);
    else this.folded.add(node);
    this.flatten();
  }

  click(event) {
    const row = event.target.closest("[data-at]");
    if (!row) return;
    const at = Number(row.dataset.at), node = this.rows[at][0];
    this.choose(at, false);
    if (event.target.closest(".twisty, .label") && event.detail < 2) this.toggle(node);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.rows.findIndex(([node]) => node === this.active);
    const page = Math.max(1, Math.floor(this.tree.clientHeight / this.height) - 1);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.rows.length - 1 };
    const does = {
      ArrowRight: () => this.right(at), ArrowLeft: () => this.left(), Enter: () => this.enter(), " ": () => this.toggle(this.active),
      Escape: () => this.escape(),
    };
    if (!this.active || !(event.key in moves || event.key in does)) return;
    event.preventDefault();
    if (event.key in moves) this.choose(moves[event.key]);
    else does[event.key]();
  }

  right(at) {
    if (this.active.finding) return;
    if (this.isOpen(this.active)) this.choose(at + 1);
    else this.toggle(this.active, true);
  }

  left() {
    const { active } = this;
    if (!active.finding && this.isOpen(active)) this.toggle(active, false);
    else if (active.parent !== this.root) this.choose(this.rows.findIndex(([node]) => node === active.parent));
  }

  enter() {
    if (this.active.finding) this.details.focus();
    else this.toggle(this.active);
  }

  escape() {
    if (!this.search.value) return;
    this.search.value = "";
    const { active } = this;
    for (let at = active && active.parent; at; at = at.parent) at.open = true;
    this.find();
    this.choose(this.rows.findIndex(([node]) => node === active));
  }

  keyInSearch(event) {
    if (event.key === "Escape") {
      this.escape();
      this.tree.focus();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      this.tree.focus();
      this.choose(Math.max(0, this.rows.findIndex(([node]) => node.finding)));
    } else return;
    event.preventDefault();
  }
}

// Bars and histograms

function bars(rows) {
  const most = Math.max(1, ...rows.map(([, value]) => value));
  return element("div", { class: "bars" }, ...rows.flatMap(([name, value, text, role]) => {
    const bar = element("i");
    bar.style.width = `${(100 * value) / most}%`;
    return [element("span", {}, name), element("span", { class: `track is-${role}` }, bar), element("b", {}, text)];
  }));
}

// How far values are apart: [exponent of 2, elements], one bar for each exponent from the least to the greatest.
function spreadOf(spread, width, height) {
  const numbers = spread.filter(([exponent]) => exponent < 1023);
  const from = numbers.length ? numbers[0][0] : 0;
  const bins = numbers.length ? numbers[numbers.length - 1][0] - from + 1 : 1;
  const most = Math.max(1, ...numbers.map(([, count]) => count));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const step = Math.min(width / bins, width / 8);
  const set = (made, values) => { for (const [name, value] of Object.entries(values)) made.setAttribute(name, value); };
  set(svg, { viewBox: `0 0 ${width} ${height}`, width, height, class: "spread", role: "img", preserveAspectRatio: "none", "aria-label": spoken(spread) });
  for (const [exponent, count] of numbers) {
    const tall = Math.max(1, (height * count) / most);
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    set(bar, { x: (exponent - from) * step, y: height - tall, width: Math.max(step - 0.6, 0.6), height: tall });
    svg.append(bar);
  }
  return svg;
}

function spoken(spread) {
  const numbers = spread.filter(([exponent]) => exponent < 1023);
  const least = numbers.length ? `${near(numbers[0][0])} to ${near(numbers[numbers.length - 1][0] + 1)} apart` : "";
  const never = spread.filter(([exponent]) => exponent >= 1023).reduce((sum, [, count]) => sum + count, 0);
  return [least, never ? `${plural(never, "element")} apart by no number` : ""].filter(Boolean).join(", ");
}

const near = (exponent) => (2 ** exponent).toPrecision(2);

function histogram(spread) {
  const numbers = spread.filter(([exponent]) => exponent < 1023);
  const parts = [element("h4", {}, "elements that differ, by |left - right|")];
  if (numbers.length) {
    const bins = Math.max(8, numbers[numbers.length - 1][0] - numbers[0][0] + 1);
    parts.push(spreadOf(numbers, 280, 72), element("div", { class: "axis" },
      element("span", {}, near(numbers[0][0])), element("span", {}, near(numbers[0][0] + bins))));
  }
  parts.push(element("p", { class: "dim" }, spoken(spread)));
  return parts;
}

setUpTheme();
setUpCopying();
if ($("listing")) new Browser(JSON.parse($("listing").textContent));
