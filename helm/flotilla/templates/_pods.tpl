{{/*
A pod template, of the head or of a group. Takes `root`, `group` (its values), `name` and `isHead`. Nothing in it may depend on
the version of the chart or on the contents of Secrets.
*/}}
{{- define "flotilla.podTemplate" -}}
{{- $root := .root -}}{{- $group := .group -}}{{- $values := $root.Values -}}
{{- $gpu := default (dict) $group.gpu -}}
{{- $gpuCount := default 0 $gpu.count | int -}}
{{- $gpuResource := default "nvidia.com/gpu" $gpu.resourceName -}}
{{- $groupLabels := dict "flotilla/group" .name "app.kubernetes.io/instance" $root.Release.Name -}}
{{- $labels := merge (include "flotilla.selectorLabels" $root | fromYaml) (dict "flotilla/group" .name) (default (dict) $group.labels) $values.pods.labels -}}
metadata:
  labels:
    {{- toYaml $labels | nindent 4 }}
  {{- with merge (dict) (default (dict) $group.annotations) $values.pods.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- /* Ray's autoscaler v2 replaces pods; the operator refuses another policy. */}}
  restartPolicy: Never
  {{- /* The autoscaler, beside the head, calls the API server; nobody else does. */}}
  {{- if not (and .isHead $values.autoscaler.enabled) }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  {{- with $group.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.pods.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "flotilla.gracePeriod" . }}
  {{- $selector := deepCopy (default (dict) $group.nodeSelector) }}
  {{- if $gpu.type }}
  {{- $_ := set $selector (default "nvidia.com/gpu.product" $gpu.productLabel) $gpu.type }}
  {{- end }}
  {{- with $selector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := default (list) $group.tolerations }}
  {{- if gt $gpuCount 0 }}
  {{- $tolerations = append $tolerations (dict "key" $gpuResource "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $spread := mergeOverwrite (dict "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" (dict "matchLabels" $groupLabels)) . }}
    - {{- toYaml $spread | nindent 6 }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $values.pods.securityContext | nindent 4 }}
  {{- with include "flotilla.initContainers" . | fromYamlArray }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" .isHead }}
      image: {{ include "flotilla.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if .isHead }}
      ports:
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: serve, containerPort: 8000}
        {{- if dig "grpc" "enabled" false $values.config }}
        - {name: grpc, containerPort: 9000}
        {{- end }}
      {{- else }}
      ports:
        - {name: serve, containerPort: 8000}
        {{- if dig "grpc" "enabled" false $values.config }}
        - {name: grpc, containerPort: 9000}
        {{- end }}
      {{- end }}
      env:
        {{- $env := include "flotilla.env" $root | fromYamlArray }}
        {{- $env = concat $env (include "flotilla.processEnv" $root | fromYamlArray) }}
        {{- $env = append $env (dict "name" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "value" (include "flotilla.drainTimeout" .)) }}
        {{- include "flotilla.lastOfEachName" (concat $env $values.pods.env (default (list) $group.env)) | nindent 8 }}
      {{- with $values.pods.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.pods.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $resources := deepCopy $group.resources }}
      {{- if gt $gpuCount 0 }}
      {{- range $kind := list "requests" "limits" }}
      {{- $_ := set $resources $kind (mergeOverwrite (dict) (default (dict) (get $resources $kind)) (dict $gpuResource $gpuCount)) }}
      {{- end }}
      {{- end }}
      resources:
        {{- include "flotilla.resources" $resources | nindent 8 }}
      {{- range $probe := list "startupProbe" "readinessProbe" "livenessProbe" }}
      {{- with get (default (dict) $group.probes) $probe }}
      {{ $probe }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      securityContext:
        {{- toYaml $values.pods.containerSecurityContext | nindent 8 }}
      volumeMounts:
        {{- include "flotilla.volumeMounts" . | nindent 8 }}
    {{- /* Behind Ray's: the operator and the autoscaler take the first one for it. */}}
    {{- with $values.pods.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "flotilla.volumes" . | nindent 4 }}
{{- end }}
