{{/* Where Ray's container has its volumes: the chart's, those of all pods, those of the group. Takes `root`, `group` and `isHead`. */}}
{{- define "flotilla.volumeMounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
{{- if include "flotilla.modelsHeld" . }}
- name: models
  mountPath: {{ $values.models.mountPath }}
  readOnly: true
  {{- if and (eq $values.models.source "pvc") $values.models.pvc.subPath }}
  subPath: {{ $values.models.pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- if $values.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/flotilla/keys, readOnly: true}
{{- end }}
{{- with concat $values.pods.volumeMounts (default (list) .group.volumeMounts) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes `root`, `group` and `isHead`. */}}
{{- define "flotilla.volumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir: {sizeLimit: {{ include "flotilla.quantityYaml" (include "flotilla.quantityText" $values.pods.tmpSizeLimit) }}}
{{- if and .isHead $values.autoscaler.enabled }}
- name: autoscaler-tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
{{- if eq $values.models.source "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ $values.models.pvc.claimName | quote }}, readOnly: true}
{{- else if include "flotilla.modelsHeld" . }}
- name: models
  emptyDir: {sizeLimit: {{ include "flotilla.quantityYaml" (include "flotilla.downloadSize" .) }}}
{{- end }}
{{- if $values.apiKeys.enabled }}
- name: api-keys
  secret: {secretName: {{ include "flotilla.keysSecret" .root | quote }}, defaultMode: 288}
{{- end }}
{{- with concat $values.pods.volumes (default (list) .group.volumes) }}
{{ toYaml . }}
{{- end }}
{{- end }}
