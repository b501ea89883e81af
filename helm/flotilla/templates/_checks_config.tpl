{{/*
What a schema of single values cannot see of the configuration: what Flotilla itself would refuse once it starts, in its words, and
workers that Ray could never place, which wait for ever without a word.
*/}}
{{- define "flotilla.configChecks" -}}
{{- $config := .Values.config -}}{{- $target := $config.target -}}
{{- $gpus := 0 -}}
{{- range .Values.workerGroups -}}{{- $gpus = add $gpus (mul (int .maxReplicas) (int (dig "gpu" "count" 0 .))) -}}{{- end -}}
{{- $ofTarget := default 0 (default (dict) $target.placement).num_gpus | float64 -}}
{{- if and (gt $gpus 0) (ne (default "auto" $target.device) "cpu") (eq $ofTarget 0.0) -}}
{{- fail "config.target.placement.num_gpus is unset, and workerGroups have GPUs: the target would run on the CPU, as GPUs are hidden from workers that reserve none. Set it to 1, or to a share such as 0.8, or config.target.device to cpu" -}}
{{- end -}}

{{- $min := default 1 (dig "scaling" "cells" "min" 1 $config) | int -}}{{- $max := default 1 (dig "scaling" "cells" "max" 1 $config) | int -}}
{{- if gt $min $max -}}
{{- fail (printf "config.scaling.cells.max %d is below config.scaling.cells.min %d; unset, max is 1" $max $min) -}}
{{- end -}}
{{- if and (dig "http" "admin" false $config) (gt $max 1) -}}
{{- fail (printf "config.http.admin changes the drafters of one cell, and config.scaling.cells.max allows %d: switch it off, or let config.scaling.drafters change the drafters of each" $max) -}}
{{- end -}}

{{- $tiers := default (dict) $config.tiers -}}
{{- range $name, $_ := $tiers -}}
{{- $seen := list $name -}}{{- $at := $name -}}
{{- range until (add 1 (len $tiers) | int) -}}
{{- $at = default "" (default (dict) (get $tiers $at)).downgrade_to -}}
{{- if has $at $seen -}}
{{- fail (printf "config.tiers are downgraded in a circle: %s -> %s" (join " -> " $seen) $at) -}}
{{- end -}}
{{- if $at -}}{{- $seen = append $seen $at -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- $depths := default (dict) $config.policy -}}
{{- $minDepth := ternary $depths.min_depth 1 (hasKey $depths "min_depth") | int -}}
{{- $maxDepth := ternary $depths.max_depth 8 (hasKey $depths "max_depth") | int -}}
{{- if and (gt $maxDepth 0) (gt $minDepth $maxDepth) -}}
{{- fail (printf "config.policy.min_depth %d is above max_depth %d" $minDepth $maxDepth) -}}
{{- end -}}

{{- $heads := default "" $target.heads -}}{{- $names := dict -}}{{- $workers := dict "config.target" $target -}}
{{- $unnamed := dict "prompt_lookup" "prompt-lookup" "suffix_automaton" "suffix-automaton" "heads" "heads" "eagle" "eagle" -}}
{{- range $index, $drafter := $config.drafters -}}
{{- $name := default (default "" (get $unnamed (toString .kind))) .name -}}
{{- $where := printf "config.drafters[%d]" $index -}}
{{- if and (hasPrefix "zoo:" (default "" .path)) (not (hasPrefix "zoo:" $target.path)) -}}
{{- fail (printf "%s: %s is of the demo's family, and config.target.path %s is not: set config.drafters to those of your target, or to [] for none; where it is not set, the demo's are kept" $where .path $target.path) -}}
{{- end -}}
{{- if has $name (list "verifier" "target" "grammar") -}}
{{- fail (printf "%s: `%s` names something else in metrics and receipts; call the drafter something else" $where $name) -}}
{{- end -}}
{{- if hasKey $names $name -}}
{{- fail (printf "%s: drafter names must differ, and %s is called %q, too; give one another name" $where (get $names $name) $name) -}}
{{- end -}}
{{- $_ := set $names $name $where -}}
{{- if has .kind (list "heads" "eagle") -}}
{{- if .placement -}}
{{- fail (printf "%s: `placement` of drafter %q cannot be chosen: it runs in the target's process; leave it out, and set config.target.placement" $where $name) -}}
{{- end -}}
{{- $heads = default .path $heads -}}
{{- if ne .path $heads -}}
{{- fail (printf "%s: drafter %q names %s, and beside the target runs %s: one set of heads, or one EAGLE layer, per target" $where $name .path $heads) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $workers (printf "%s (%s)" $where $name) $drafter -}}
{{- end -}}
{{- range $where, $worker := $workers -}}
{{- if and (eq (default "auto" $worker.device) "cuda") (not (default (dict) $worker.placement).num_gpus) -}}
{{- fail (printf "%s: `device: cuda` needs `placement.num_gpus`, 1 or a share such as 0.25: GPUs are hidden from workers that reserve none" $where) -}}
{{- end -}}
{{- include "flotilla.checkPlacement" (dict "root" $ "where" $where "placement" (default (dict) $worker.placement)) -}}
{{- end -}}
{{- include "flotilla.checkCpus" . -}}
{{- range $kind := list "cells" "front_ends" -}}
{{- $placement := dig "scaling" $kind "placement" (dict) $config -}}
{{- include "flotilla.checkPlacement" (dict "root" $ "where" (printf "config.scaling.%s" $kind) "placement" (default (dict) $placement)) -}}
{{- end -}}
{{- end }}

{{/*
Whether pods of some group have what a worker is placed by. What Ray gives nodes itself is no group's. Takes `root`, `where` and
`placement`.
*/}}
{{- define "flotilla.checkPlacement" -}}
{{- $groups := .root.Values.workerGroups -}}
{{- $ofHead := default "" .root.Values.head.rayStartParams.resources -}}
{{- range $name, $amount := .placement.resources -}}
{{- $most := 0.0 -}}
{{- range $groups -}}{{- $most = maxf $most (get (include "flotilla.rayResources" . | fromJson) $name | default 0) -}}{{- end -}}
{{- $isRays := or (hasPrefix "accelerator_type:" $name) (hasPrefix "node:" $name) (has $name (list "memory" "object_store_memory")) -}}
{{- if not (or $isRays (contains (printf "%q" $name) $ofHead) (ge $most (float64 $amount))) -}}
{{- fail (printf "%s: placement.resources asks for %v of %q, and a pod of workerGroups has %v at most, so it would wait for ever: set rayResources of a group" $.where $amount $name $most) -}}
{{- end -}}
{{- end -}}
{{- range $label, $selector := .placement.labels -}}
{{- $wanted := list $selector -}}
{{- if hasPrefix "in(" $selector -}}{{- $wanted = $selector | trimPrefix "in(" | trimSuffix ")" | nospace | splitList "," -}}{{- end -}}
{{- $isThere := or (hasPrefix "!" $selector) (hasPrefix "ray.io/" $label) -}}
{{- range $groups -}}{{- if has (get (default (dict) .rayLabels) $label) $wanted -}}{{- $isThere = true -}}{{- end -}}{{- end -}}
{{- if not $isThere -}}
{{- fail (printf "%s: placement.labels asks for nodes with %s=%s, and no group of workerGroups has them, so it would wait for ever: set rayLabels of a group" $.where $label $selector) -}}
{{- end -}}
{{- end -}}
{{- end }}
