{{- define "graftwork.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels of one part: call it with (list $ "gateway"). */}}
{{- define "graftwork.selector" -}}
app.kubernetes.io/name: graftwork
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "graftwork.labels" -}}
{{ include "graftwork.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* Variables that gateways and engines share. */}}
{{- define "graftwork.env" -}}
- name: GRAFTWORK_MODEL
  value: /models/{{ .Values.model.folder }}
- name: GRAFTWORK_FLEET
  value: leases
- name: GRAFTWORK_DATABASE_URL
  valueFrom: { secretKeyRef: { name: {{ .Values.secret }}, key: database-url } }
- name: GRAFTWORK_ENGINE_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .Values.secret }}, key: engine-token } }
{{- if .Values.engineTls.secret }}
- name: GRAFTWORK_ENGINE_TLS_CA
  value: /etc/graftwork/tls/ca.crt
- name: GRAFTWORK_ENGINE_TLS_CERT
  value: /etc/graftwork/tls/tls.crt
- name: GRAFTWORK_ENGINE_TLS_KEY
  value: /etc/graftwork/tls/tls.key
- name: GRAFTWORK_ENGINE_TLS_NAME
  value: {{ .Values.engineTls.name }}
{{- end }}
{{- end }}

{{/* Volumes that gateways and engines share, and where they are mounted. */}}
{{- define "graftwork.mounts" -}}
- { name: models, mountPath: /models, readOnly: true }
- { name: artifacts, mountPath: /var/lib/graftwork/artifacts }
- { name: tmp, mountPath: /tmp }
{{- if .Values.engineTls.secret }}
- { name: engine-tls, mountPath: /etc/graftwork/tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "graftwork.volumes" -}}
- name: models
  persistentVolumeClaim: { claimName: {{ .Values.model.claim }}, readOnly: true }
- name: artifacts
  persistentVolumeClaim: { claimName: {{ .Values.artifacts.claim | default (printf "%s-artifacts" (include "graftwork.name" .)) }} }
- name: data
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if .Values.engineTls.secret }}
- name: engine-tls
  secret: { secretName: {{ .Values.engineTls.secret }}, defaultMode: 0440 }
{{- end }}
{{- end }}

{{- define "graftwork.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "graftwork.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}
