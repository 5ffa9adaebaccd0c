// An invoice as a file. The lines are those of `graftwork usage export`.

const COLUMNS = ["price_list", "item", "quantity", "unit", "rate", "amount", "currency"];

export function invoiceCsv(invoice) {
  const rows = invoice.lines.map((line) => [invoice.tenant_id, invoice.month, ...COLUMNS.map((name) => line[name])]);
  return [["tenant", "month", ...COLUMNS], ...rows].map((row) => `${row.map(cell).join(",")}\n`).join("");
}

export function invoiceJson(invoice) {
  return `${JSON.stringify(invoice, null, 2)}\n`;
}

/** Makes the browser keep a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function cell(value) {
  const text = String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
