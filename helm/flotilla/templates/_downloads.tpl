{{/*
What a pod holds of the models: `all`, `tokenizers` where only front ends run, or nothing. Takes `root`, `group` and `isHead`. A volume
with models is mounted everywhere, so that whoever looks finds them.
*/}}
{{- define "flotilla.modelsHeld" -}}
{{- $source := .root.Values.models.source -}}
{{- if eq $source "pvc" -}}all
{{- else if and (eq $source "download") (not .isHead) -}}
{{- ternary "tokenizers" "all" (eq (include "flotilla.runs" .group) (list "front-ends" | toJson)) -}}
{{- end -}}
{{- end }}

{{/* Size of the volume that downloads go to. Takes `root`, `group` and `isHead`. */}}
{{- define "flotilla.downloadSize" -}}
{{- ternary (include "flotilla.quantityText" .root.Values.models.downloadSizeLimit) "1Gi" (eq (include "flotilla.modelsHeld" .) "all") -}}
{{- end }}

{{/* Resources of the containers that download. A node without room for the volume would evict the pod when it is full. Takes the same. */}}
{{- define "flotilla.downloadResources" -}}
{{- $given := .root.Values.models.downloadResources -}}
{{- $requests := mergeOverwrite (dict "ephemeral-storage" (include "flotilla.downloadSize" .)) $given.requests -}}
{{- include "flotilla.resources" (dict "requests" $requests "limits" $given.limits) -}}
{{- end }}

{{/* Fetches models before Ray starts; what is there already is not fetched again. Takes `root`, `group` and `isHead`. */}}
{{- define "flotilla.downloads" -}}
{{- $root := .root -}}{{- $values := $root.Values -}}
{{- $patterns := list "*.json" "*.txt" "*.model" "*.jinja" -}}
{{- if eq (include "flotilla.modelsHeld" .) "all" -}}{{- $patterns = prepend $patterns "*.safetensors" -}}{{- end -}}
{{- /* The image says HF_HUB_OFFLINE, and so may the environment of pods, for Ray. */ -}}
{{- $env := concat (include "flotilla.env" $root | fromYamlArray) $values.pods.env (default (list) .group.env) -}}
{{- $env = append $env (dict "name" "HF_HUB_OFFLINE" "value" "0") -}}
{{- with $values.models.hubToken -}}
{{- if .secretName -}}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" .secretName "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- $resources := include "flotilla.downloadResources" . -}}
{{- $mounts := list (dict "name" "models" "mountPath" $values.models.mountPath) (dict "name" "tmp" "mountPath" "/tmp") -}}
{{- $mounts = concat $mounts $values.pods.volumeMounts (default (list) .group.volumeMounts) -}}
{{- range $index, $model := $values.models.download }}
- name: download-{{ $index }}
  image: {{ include "flotilla.image" $root }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ $model.repository | quote }}
    - --revision={{ $model.revision }}
    - --local-dir={{ $values.models.mountPath }}/{{ $model.directory }}
    {{- range $patterns }}
    - --include={{ . }}
    {{- end }}
  env:
    {{- include "flotilla.lastOfEachName" $env | nindent 4 }}
  {{- with $values.pods.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- $resources | nindent 4 }}
  securityContext:
    {{- toYaml $values.pods.containerSecurityContext | nindent 4 }}
  volumeMounts:
    {{- toYaml $mounts | nindent 4 }}
{{- end }}
{{- end }}

{{/* What runs before Ray starts: containers of all pods, then downloads, which may need what those prepare. Takes `root`, `group` and `isHead`. */}}
{{- define "flotilla.initContainers" -}}
{{- with .root.Values.pods.initContainers }}
{{ toYaml . }}
{{- end }}
{{- if and (eq .root.Values.models.source "download") (include "flotilla.modelsHeld" .) }}
{{ include "flotilla.downloads" . }}
{{- end }}
{{- end }}
