{{/*
CPUs that Ray counts in a group's pods, as operator and autoscaler do: the parameter of `ray start`, else the limit, else the request,
rounded up. Empty where there is none of them: the autoscaler ends by it.
*/}}
{{- define "flotilla.rayCpus" -}}
{{- $params := default (dict) .rayStartParams -}}
{{- if hasKey $params "num-cpus" -}}{{- get $params "num-cpus" -}}
{{- else if hasKey .resources.limits "cpu" -}}{{- include "flotilla.quantity" .resources.limits.cpu | float64 | ceil -}}
{{- else if hasKey .resources.requests "cpu" -}}{{- include "flotilla.quantity" .resources.requests.cpu | float64 | ceil -}}
{{- end -}}
{{- end }}

{{/*
More CPUs than any pod has, or all of them together, would be waited for without end. Bundles are those of cluster/placement.py: each
rank, with the first of them who is beside it, and each drafter that is elsewhere; with a drafter on a node of its own, all ranks are
in one. One that also reserves GPUs needs a pod that has both.
*/}}
{{- define "flotilla.checkCpus" -}}
{{- $config := .Values.config -}}{{- $target := $config.target -}}
{{- range $index, $group := .Values.workerGroups -}}
{{- if not (include "flotilla.rayCpus" $group) -}}
{{- fail (printf "workerGroups[%d] (%s): neither resources.limits nor resources.requests has cpu, so that Ray would take the node's CPUs for the pod's, and its autoscaler would fail: set one, or rayStartParams.num-cpus" $index $group.name) -}}
{{- end -}}
{{- end -}}

{{- $ofRank := dig "placement" "num_cpus" 1.0 $target | float64 -}}{{- $gpusOfRank := dig "placement" "num_gpus" 0.0 $target | float64 -}}
{{- $ranks := default 1 $target.tensor_parallel | int -}}
{{- $isSpread := false -}}
{{- range $config.drafters -}}{{- if eq (dig "placement" "collocate" "anywhere" .) "own-node" -}}{{- $isSpread = true -}}{{- end -}}{{- end -}}
{{- $together := ternary (mulf $ranks $ofRank) $ofRank $isSpread -}}{{- $gpusTogether := ternary (mulf $ranks $gpusOfRank) $gpusOfRank $isSpread -}}
{{- $ofCell := mulf $ranks $ofRank -}}
{{- range $index, $drafter := $config.drafters -}}
{{- $placement := default (dict) .placement -}}{{- $cpus := default 0.0 $placement.num_cpus | float64 -}}{{- $gpus := default 0.0 $placement.num_gpus | float64 -}}
{{- $where := printf "config.drafters[%d] (%s)" $index (default .kind .name) -}}
{{- include "flotilla.checkCpusOfPod" (dict "root" $ "where" $where "cpus" $cpus "gpus" $gpus) -}}
{{- $ofKind := mulf (default 1 .replicas) $cpus -}}
{{- $ofCell = addf $ofCell $ofKind -}}
{{- $collocate := default "anywhere" $placement.collocate -}}
{{- if or (eq $collocate "target") (and $isSpread (eq $collocate "anywhere") (not $placement.labels)) -}}
{{- $together = addf $together $ofKind -}}{{- $gpusTogether = addf $gpusTogether (mulf (default 1 .replicas) $gpus) -}}
{{- end -}}
{{- end -}}
{{- if eq (dig "pool" "strategy" "PACK" $config) "STRICT_PACK" -}}{{- $together = $ofCell -}}{{- end -}}
{{- $who := ternary "config.target" "config.target with the workers that must be on its node" (eq $together $ofRank) -}}
{{- include "flotilla.checkCpusOfPod" (dict "root" . "where" $who "cpus" $together "gpus" $gpusTogether) -}}

{{- $all := default "0" (get .Values.head.rayStartParams "num-cpus") | float64 -}}
{{- range .Values.workerGroups -}}{{- $all = addf $all (mulf .maxReplicas (include "flotilla.rayCpus" . | float64)) -}}{{- end -}}
{{- $needed := 0.0 -}}
{{- range $kind, $runs := dict "cells" "cells" "front_ends" "front-ends" -}}
{{- $cpus := dig "scaling" $kind "placement" "num_cpus" 0.0 $config | float64 -}}
{{- include "flotilla.checkCpusOfPod" (dict "root" $ "where" (printf "config.scaling.%s" $kind) "cpus" $cpus "gpus" 0.0 "runs" $runs) -}}
{{- $number := ternary (dig "scaling" "cells" "max" 1 $config) (default (dig "http" "front_ends" 1 $config) (dig "scaling" "front_ends" "max" nil $config)) (eq $kind "cells") -}}
{{- $needed = addf $needed (mulf $number (addf $cpus (ternary $ofCell 0.0 (eq $kind "cells")))) -}}
{{- end -}}
{{- if gt (round $needed 4) $all -}}
{{- fail (printf "config asks for %v CPUs (placement.num_cpus of at most so many cells and front ends as scaling says; 1 of each rank of the target unless set), and workerGroups have at most %v (maxReplicas times the CPUs of a pod), so some would wait for ever" (round $needed 4) $all) -}}
{{- end -}}
{{- end }}

{{/* Takes `root`, `where`, `cpus`, `gpus`, and `runs` where only groups that run it count. */}}
{{- define "flotilla.checkCpusOfPod" -}}
{{- $most := ternary 0.0 (default "0" (get .root.Values.head.rayStartParams "num-cpus") | float64) (or (hasKey . "runs") (gt .gpus 0.0)) -}}
{{- range .root.Values.workerGroups -}}
{{- $isOne := or (not $.runs) (has $.runs (include "flotilla.runs" . | fromJsonArray)) -}}
{{- if and $isOne (ge (dig "gpu" "count" 0 . | float64) (round $.gpus 4)) -}}{{- $most = maxf $most (include "flotilla.rayCpus" . | float64) -}}{{- end -}}
{{- end -}}
{{- if gt (round .cpus 4) $most -}}
{{- fail (printf "%s: placement.num_cpus asks for %v CPUs on one node, and a pod of workerGroups that could be it has %v at most, so it would wait for ever: lower it, or raise resources.limits.cpu of a group" .where (round .cpus 4) $most) -}}
{{- end -}}
{{- end }}
