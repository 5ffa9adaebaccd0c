// The list of pages: which addresses there are, and which of them a key may see.

import { showAdapter } from "./pages/adapters/adapter.js";
import { showAdapters } from "./pages/adapters/list.js";
import { showUpload } from "./pages/adapters/upload.js";
import { showInvoice, showInvoices, showMonths } from "./pages/billing/invoices.js";
import { showPrices } from "./pages/billing/prices.js";
import { showAudit, showModes } from "./pages/operator.js";
import { showFleetAdapters, showFleetSessions } from "./pages/fleet_lists.js";
import { showKeys } from "./pages/keys/page.js";
import { showOverview } from "./pages/overview.js";
import { showPeople } from "./pages/people/list.js";
import { showPerson } from "./pages/people/person.js";
import { showReplicas } from "./pages/replicas.js";
import { showRequest, showRequests } from "./pages/request.js";
import { showSession } from "./pages/session.js";
import { showSessions } from "./pages/sessions.js";
import { showTenant } from "./pages/tenant.js";
import { showTenants } from "./pages/tenants.js";
import { showUsage } from "./pages/usage.js";
import { showPlayground } from "./playground/page.js";

const ADMIN = [
  ["", [["", "Overview", "overview", "o"], ["tenants", "Tenants", "tenants", "n"], ["people", "People", "people", "p"], ["adapters", "Adapters", "adapters", "a"], ["sessions", "Sessions", "sessions", "s"], ["replicas", "Engines", "replicas", "e"]]],
  ["Records", [["requests", "Requests", "request", "r"], ["usage", "Usage", "usage", "u"], ["invoices", "Invoices", "invoices", "i"], ["prices", "Prices", "prices", "c"], ["audit", "Audit", "audit", "l"], ["modes", "Degraded modes", "modes", "m"]]],
];
const TENANT = [
  ["", [["", "Overview", "overview", "o"], ["playground", "Playground", "playground", "p"], ["adapters", "Adapters", "adapters", "a"], ["sessions", "Sessions", "sessions", "s"], ["keys", "Keys", "keys", "k"]]],
  ["Records", [["requests", "Requests", "request", "r"], ["usage", "Usage", "usage", "u"], ["invoices", "Invoices", "invoices", "i"], ["prices", "Prices", "prices", "c"]]],
];

export function sectionsFor(identity) {
  if (identity.isAdmin) return ADMIN;
  const needs = { playground: identity.can("inference"), keys: identity.managesTenant };
  const wanted = ([path]) => needs[path] ?? true;
  return TENANT.map(([heading, entries]) => [heading, entries.filter(wanted)]);
}

export function routesFor(identity) {
  const shared = [
    { pattern: /^$/, title: "Overview", show: showOverview },
    { pattern: /^usage$/, title: "Usage", show: showUsage },
    { pattern: /^prices$/, title: "Prices", show: showPrices },
    { pattern: /^requests$/, title: "Requests", show: showRequests },
    { pattern: /^requests\/([^/]+)$/, title: "Request", show: showRequest },
  ];
  const own = identity.isAdmin ? [
    { pattern: /^tenants$/, title: "Tenants", show: showTenants },
    { pattern: /^tenants\/([^/]+)$/, title: "Tenant", show: showTenant },
    { pattern: /^people$/, title: "People", show: showPeople },
    { pattern: /^people\/([^/]+)$/, title: "Person", show: showPerson },
    { pattern: /^adapters$/, title: "Adapters", show: showFleetAdapters },
    { pattern: /^sessions$/, title: "Sessions", show: showFleetSessions },
    { pattern: /^replicas$/, title: "Engines", show: showReplicas },
    { pattern: /^invoices$/, title: "Invoices", show: showInvoices },
    { pattern: /^invoices\/([^/]+)$/, title: "Invoices of a tenant", show: showMonths },
    { pattern: /^invoices\/([^/]+)\/([^/]+)$/, title: "Invoice", show: showInvoice },
    { pattern: /^audit$/, title: "Audit", show: showAudit },
    { pattern: /^modes$/, title: "Degraded modes", show: showModes },
  ] : [
    { pattern: /^playground$/, title: "Playground", show: showPlayground },
    { pattern: /^adapters$/, title: "Adapters", show: showAdapters },
    { pattern: /^adapters\/upload$/, title: "Upload an adapter", show: showUpload },
    { pattern: /^adapters\/name\/([^/]+)$/, title: "Adapter", show: showAdapter },
    { pattern: /^invoices$/, title: "Invoices", show: showMonths },
    { pattern: /^invoices\/([^/]+)$/, title: "Invoice", show: showInvoice },
    { pattern: /^sessions$/, title: "Sessions", show: showSessions },
    { pattern: /^sessions\/([^/]+)$/, title: "Session", show: showSession },
    ...identity.managesTenant ? [{ pattern: /^keys$/, title: "Keys and members", show: showKeys }] : [],
  ];
  return [...shared, ...own];
}
