{{- define "flotilla.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{/* Name of the RayService: at most 47 characters, so that what the operator appends fits into 63. */}}
{{- define "flotilla.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := include "flotilla.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Name of an object beside the RayService: where it is cut to 63 characters, a hash keeps it apart from others. Takes `root` and `name`. */}}
{{- define "flotilla.nameOf" -}}
{{- $name := printf "%s-%s" (include "flotilla.fullname" .root) .name -}}
{{- if gt (len $name) 63 -}}
{{- $name = printf "%s-%s" ($name | trunc 54 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* Labels of objects; never of pods, where the chart's version would make a second cluster. */}}
{{- define "flotilla.labels" -}}
{{- include "flotilla.labelsWith" (dict "root" . "labels" (dict)) -}}
{{- end }}

{{/* The same with those of one kind of object, as one map: a key written twice would be no valid YAML. */}}
{{- define "flotilla.labelsWith" -}}
{{- $own := include "flotilla.selectorLabels" .root | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/name" (include "flotilla.name" .root) -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- mergeOverwrite (dict) .root.Values.commonLabels .labels $own | toYaml -}}
{{- end }}

{{/* Labels of pods, the same from version to version; what selects pods does so by these. `name` is the operator's. */}}
{{- define "flotilla.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: flotilla
{{- end }}

{{- define "flotilla.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "flotilla.serveService" -}}
{{ include "flotilla.fullname" . }}-serve-svc
{{- end }}

{{- define "flotilla.keysSecret" -}}
{{- default (printf "%s-keys" (include "flotilla.fullname" .)) .Values.apiKeys.existingSecret -}}
{{- end }}

{{/* Ray's resources of a group's pods as JSON: those of the values, and what cells and front ends are placed by. */}}
{{- define "flotilla.rayResources" -}}
{{- $resources := deepCopy (default (dict) .rayResources) -}}
{{- $runs := include "flotilla.runs" . | fromJsonArray -}}
{{- if has "cells" $runs -}}{{- $_ := set $resources "flotilla-cell" 1 -}}{{- end -}}
{{- if has "front-ends" $runs -}}{{- $_ := set $resources "flotilla-front-end" 1 -}}{{- end -}}
{{- toJson $resources -}}
{{- end }}

{{/*
Resources of a container as YAML. The RayService's schema takes integers and strings for quantities: of a number with a fraction, its
text. Whole numbers stay as they are: a change would make a second cluster.
*/}}
{{- define "flotilla.resources" -}}
{{- $written := dict -}}
{{- range $kind, $quantities := . -}}
{{- $ofKind := dict -}}
{{- range $name, $quantity := $quantities -}}
{{- $_ := set $ofKind $name (ternary (toString $quantity) $quantity (include "flotilla.hasFraction" $quantity | eq "true")) -}}
{{- end -}}
{{- $_ := set $written $kind $ofKind -}}
{{- end -}}
{{- toYaml $written -}}
{{- end }}

{{/* A single quantity as text: whole numbers in all their digits. */}}
{{- define "flotilla.quantityText" -}}
{{- if or (kindIs "string" .) (include "flotilla.hasFraction" . | eq "true") -}}{{- . -}}{{- else -}}{{- int64 . -}}{{- end -}}
{{- end }}

{{/* Its text as YAML, likewise: what would be read as a fraction is quoted. */}}
{{- define "flotilla.quantityYaml" -}}
{{- if contains "." . -}}{{- . | quote -}}{{- else -}}{{- . -}}{{- end -}}
{{- end }}

{{/* Whether a quantity is a number, and no whole one. */}}
{{- define "flotilla.hasFraction" -}}
{{- if or (kindIs "string" .) (kindIs "invalid" .) -}}false{{- else -}}{{- ne (floor .) (float64 .) -}}{{- end -}}
{{- end }}
