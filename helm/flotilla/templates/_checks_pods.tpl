{{/*
What a schema of single values cannot see of pods: lists that are put together and must not have a name twice, mounts of volumes that
there are not, and requests above limits. The API server refuses these, of pods only when the operator makes them.
*/}}
{{- define "flotilla.podChecks" -}}
{{- include "flotilla.checkQuantities" (dict "where" "autoscaler" "resources" .Values.autoscaler.resources) -}}
{{- include "flotilla.checkQuantities" (dict "where" "models" "field" "downloadResources" "resources" .Values.models.downloadResources) -}}
{{- include "flotilla.checkPod" (dict "root" . "group" .Values.head "where" "head" "isHead" true) -}}
{{- range $index, $group := .Values.workerGroups -}}
{{- $where := printf "workerGroups[%d] (%s)" $index $group.name -}}
{{- if has $group.name (list "head" "headgroup") -}}
{{- fail (printf "%s: the head's pods have that name; choose another" $where) -}}
{{- end -}}
{{- include "flotilla.checkPod" (dict "root" $ "group" $group "where" $where "isHead" false) -}}
{{- $spreads := list -}}
{{- range $group.topologySpreadConstraints -}}
{{- $spreads = append $spreads (printf "%s, %s" .topologyKey (default "ScheduleAnyway" .whenUnsatisfiable)) -}}
{{- end -}}
{{- include "flotilla.checkOnce" (dict "where" $where "what" "topologySpreadConstraints of the same topologyKey and whenUnsatisfiable" "names" $spreads) -}}
{{- end -}}
{{- end }}

{{/* Takes `root`, `group` (its values), `where` and `isHead`. */}}
{{- define "flotilla.checkPod" -}}
{{- $where := .where -}}{{- $volumes := list -}}{{- $paths := list -}}
{{- range include "flotilla.volumes" . | fromYamlArray -}}{{- $volumes = append $volumes .name -}}{{- end -}}
{{- include "flotilla.checkOnce" (dict "where" $where "what" "volumes (of pods, the group and the chart)" "names" $volumes) -}}
{{- range include "flotilla.volumeMounts" . | fromYamlArray -}}
{{- $paths = append $paths (default "/" (trimSuffix "/" .mountPath)) -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s: volumeMounts has %q at %s, and there is no such volume; the volumes are: %s" $where .name .mountPath (join ", " $volumes)) -}}
{{- end -}}
{{- end -}}
{{- include "flotilla.checkOnce" (dict "where" $where "what" "volumeMounts (of pods, the group and the chart)" "names" $paths) -}}
{{- $containers := list (ternary "ray-head" "ray-worker" .isHead) -}}
{{- /* Those that the operator adds. */ -}}
{{- $containers = concat $containers (list "autoscaler" "wait-gcs-ready") -}}
{{- range concat (include "flotilla.initContainers" . | fromYamlArray) .root.Values.pods.extraContainers -}}
{{- $containers = append $containers .name -}}
{{- range .volumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s: a container of pods.initContainers or pods.extraContainers mounts %q, and there is no such volume; the volumes are: %s" $where .name (join ", " $volumes)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "flotilla.checkOnce" (dict "where" $where "what" "containers (of pods.initContainers, pods.extraContainers, the chart and the operator)" "names" $containers) -}}
{{- include "flotilla.checkQuantities" (dict "where" $where "resources" .group.resources) -}}
{{- if and (eq .root.Values.models.source "download") (include "flotilla.modelsHeld" .) -}}
{{- $resources := include "flotilla.downloadResources" . | fromYaml -}}
{{- include "flotilla.checkQuantities" (dict "where" (printf "%s, models" $where) "field" "downloadResources" "resources" $resources) -}}
{{- end -}}
{{- end }}

{{/* Takes `where`, `what` and `names`. */}}
{{- define "flotilla.checkOnce" -}}
{{- $seen := dict -}}
{{- range .names -}}
{{- if hasKey $seen . -}}{{- fail (printf "%s: two %s: %s; change one" $.where $.what .) -}}{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- end }}

{{/* Takes `where` and `resources`, and `field` if they are called otherwise. */}}
{{- define "flotilla.checkQuantities" -}}
{{- range $name, $request := .resources.requests -}}
{{- if hasKey $.resources.limits $name -}}
{{- $limit := get $.resources.limits $name -}}
{{- if gt (include "flotilla.quantity" $request | float64) (include "flotilla.quantity" $limit | float64) -}}
{{- fail (printf "%s: %s.requests.%s %v is above its limit %v" $.where (default "resources" $.field) $name $request $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "flotilla.quantity" -}}
{{- if kindIs "string" . -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- mulf (trimSuffix $unit . | float64) (default 1.0 (get $units $unit)) | printf "%.3f" -}}
{{- else -}}
{{- float64 . | printf "%.3f" -}}
{{- end -}}
{{- end }}
