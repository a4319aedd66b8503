"""Coastline's recommender, asked for a ResNet-50 on V100s."""

from __future__ import annotations

from coastline.sdk.models.context import SystemContext
from coastline.sdk.recommend.facade import Coastline

WORKLOAD = {
    "llm_model": "resnet50",
    "fine_tuning_method": "full",
    "gpu_model": "V100",
    "tokens_per_sample": 1,
    "batch_size": 32,
}

if __name__ == "__main__":
    try:
        context = SystemContext.for_gpus(["V100"], max_gpus=8)
        Coastline(predictor="kavier", feasibility="rules").recommend(WORKLOAD, context=context)
    except Exception as error:
        raise SystemExit(" ".join(str(error).split())[:200]) from None
    raise SystemExit("it took the job: write down its answer")
