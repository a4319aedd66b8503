"""IBM ado's autoconf plug-in: which networks and devices its recommender takes."""

from __future__ import annotations

from autoconf.min_gpu_recommender import GPUModel, ModelName

if __name__ == "__main__":
    models, devices = (each.propertyDomain.values for each in (ModelName, GPUModel))
    assert "resnet50" not in models
    assert "V100" not in devices
    raise SystemExit(f"takes {len(models)} named language models on {', '.join(devices)}; not ResNet-50, not a V100")
