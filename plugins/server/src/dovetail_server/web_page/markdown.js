// Renders Markdown as DOM nodes. Text becomes text nodes only, so that output of a model can never
// become elements, attributes other than `href`, or code. Links lead to http and https only.

const INLINE =
  /(?<!`)(`{1,4})(?!`)([\s\S]{1,2000}?)(?<!`)\1(?!`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]{1,500})\]\((https?:\/\/[^\s)]{1,2000})\)/g;
const MAX_CHARACTERS = 200_000;
const MAX_QUOTES = 8;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (match[2] !== undefined) nodes.push(element("code", match[2]));
    else if (match[3] !== undefined) nodes.push(element("strong", match[3]));
    else if (match[4] !== undefined) nodes.push(element("em", match[4]));
    else {
      const link = element("a", match[5]);
      link.href = match[6];
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
      nodes.push(link);
    }
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** Return a list and the index of the line after it. Items may be separated by an empty line. */
function list(lines, start, pattern, name) {
  const node = element(name);
  let index = start;
  for (let match; index < lines.length && (match = pattern.exec(lines[index])); index++) {
    node.append(element("li", ...inline(match[1])));
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
      nodes.push(element("pre", element("code", code.join("\n"))));
    } else if (heading) {
      nodes.push(element(`h${Math.min(4, heading[1].length + 1)}`, ...inline(heading[2].trim())));
      index++;
    } else if (/^\s*[-*+]\s+/.test(line)) {
      const [node, next] = list(lines, index, /^\s*[-*+]\s+([\s\S]*)$/, "ul");
      nodes.push(node);
      index = next;
    } else if (/^\s*\d{1,9}[.)]\s+/.test(line)) {
      const [node, next] = list(lines, index, /^\s*\d{1,9}[.)]\s+([\s\S]*)$/, "ol");
      nodes.push(node);
      index = next;
    } else if (/^>/.test(line) && depth < MAX_QUOTES) {
      const quoted = [];
      for (; index < lines.length && /^>/.test(lines[index]); index++)
        quoted.push(lines[index].replace(/^> ?/, ""));
      nodes.push(element("blockquote", ...blocks(quoted, depth + 1)));
    } else if (!line.trim()) {
      index++;
    } else {
      const paragraph = [line];
      const starts = /^(\s*(```|~~~|[-*+]\s|\d{1,9}[.)]\s)|#{1,6}\s|>)/;
      for (index++; index < lines.length && lines[index].trim() && !starts.test(lines[index]); index++)
        paragraph.push(lines[index]);
      nodes.push(element("p", ...inline(paragraph.join("\n"))));
    }
  }
  return nodes;
}

/** Replace the children of `target` with the rendered text. Very long text stays plain. */
export function render(target, text) {
  const lines = text.split(/\r\n|[\n\r\u2028\u2029]/);
  if (text.length > MAX_CHARACTERS) target.replaceChildren(element("pre", text));
  else target.replaceChildren(...blocks(lines, 0));
}
