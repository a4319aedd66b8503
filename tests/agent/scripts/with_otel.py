"""Trains in a process that configures the OpenTelemetry SDK (except with `--without`); prints the collected metrics."""

import sys

import torch

import tula_agent

if "--without" not in sys.argv:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tula_agent.init()
run.watch(model, optimizer)
for batch in run.steps([torch.ones(4, 4)] * 30):
    model(batch).sum().backward()
    optimizer.step()
run.finish()
if "--without" in sys.argv:
    print("imported", *sorted(name for name in sys.modules if name.startswith("opentelemetry")))
else:
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                (point,) = metric.data.data_points
                print(
                    "metric", metric.name, metric.unit, point.count, f"{point.sum:.9g}", point.attributes["tula.run.id"]
                )
