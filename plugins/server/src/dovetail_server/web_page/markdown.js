// Renders Markdown as DOM nodes. Text becomes text nodes only, so that output of a model can never
// become elements, attributes other than `href` and `start`, or code. Links lead to http and https
// only. Each expression takes time in proportion to the text: it stops at the next character that
// could start another match.

const INLINE =
  /(?<!`)`([^`]+)`(?!`)|(?<!`)``(?!`)([^]*?[^`])``(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^[\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000})\)/g;
const LINE_END = /\r\n?|[\n\u2028\u2029]/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const MAX_CHARACTERS = 200_000;
const MAX_QUOTES = 8;
const MAX_NODES = 20_000;

function element(name, children) {
  const node = document.createElement(name);
  for (const child of children) node.append(child);
  return node;
}

function link(text, address) {
  const node = element("a", [text]);
  node.href = address;
  node.rel = "noopener noreferrer nofollow";
  node.target = "_blank";
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (nodes.length >= MAX_NODES) break;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [, code, longCode, strong, emphasis, label, address] = match;
    if (label !== undefined) nodes.push(link(label, address));
    else if (strong !== undefined) nodes.push(element("strong", [strong]));
    else if (emphasis !== undefined) nodes.push(element("em", [emphasis]));
    else nodes.push(element("code", [code ?? longCode]));
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** Return a list and the index of the line after it. Items may be separated by an empty line. */
function list(lines, start, pattern, name) {
  const node = element(name, []);
  const number = Number(pattern.exec(lines[start])[1]);
  if (name === "ol" && number !== 1) node.start = number;
  let index = start;
  for (let match; index < lines.length && (match = pattern.exec(lines[index])); index++) {
    node.append(element("li", inline(match.at(-1))));
    if (lines[index + 1]?.trim() === "" && pattern.test(lines[index + 2] ?? "")) index++;
  }
  return [node, index];
}

function blocks(lines, depth) {
  const nodes = [];
  for (let index = 0; index < lines.length; ) {
    const line = lines[index];
    const fence = /^\s*(```+|~~~+)/.exec(line);
    const heading = /^(#{1,6})\s([\s\S]*)$/.exec(line);
    if (fence) {
      const code = [];
      for (index++; index < lines.length && !lines[index].trim().startsWith(fence[1]); index++)
        code.push(lines[index]);
      index++;
      nodes.push(element("pre", [element("code", [code.join("\n")])]));
    } else if (heading) {
      nodes.push(element(`h${Math.min(4, heading[1].length + 1)}`, inline(heading[2].trim())));
      index++;
    } else if (BULLET.test(line)) {
      const [node, next] = list(lines, index, BULLET, "ul");
      nodes.push(node);
      index = next;
    } else if (NUMBER.test(line)) {
      const [node, next] = list(lines, index, NUMBER, "ol");
      nodes.push(node);
      index = next;
    } else if (/^>/.test(line) && depth < MAX_QUOTES) {
      const quoted = [];
      for (; index < lines.length && /^>/.test(lines[index]); index++)
        quoted.push(lines[index].replace(/^> ?/, ""));
      nodes.push(element("blockquote", blocks(quoted, depth + 1)));
    } else if (!line.trim()) {
      index++;
    } else {
      const paragraph = [line];
      const starts = /^(\s*(```|~~~|[-*+]\s|\d{1,9}[.)]\s)|#{1,6}\s|>)/;
      for (index++; index < lines.length && lines[index].trim() && !starts.test(lines[index]); index++)
        paragraph.push(lines[index]);
      nodes.push(element("p", inline(paragraph.join("\n"))));
    }
  }
  return nodes;
}

/** Replace the children of `target` with the rendered text. Very long text stays plain. */
export function render(target, text) {
  const lines = text.split(LINE_END);
  const isLong = text.length > MAX_CHARACTERS || lines.length > MAX_NODES;
  const nodes = isLong ? [element("pre", [text])] : blocks(lines, 0);
  const fragment = new DocumentFragment();
  for (const node of nodes) fragment.append(node);
  target.replaceChildren(fragment);
}
