"""A small pool for selectors under test."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from selector.protocol import DrafterView, PoolView, RequestView, Selector

LAYER_S = {"small": 0.001, "middle": 0.002, "large": 0.004}


class Costs:
    """Constant seconds."""

    def verify_s(self, num_context: int) -> float:
        return 0.02

    def token_s(self, num_context: int) -> float:
        return 0.0005

    def layer_s(self, kind: str, num_context: int) -> float:
        return LAYER_S.get(kind.split("-")[0], 0.001)

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        return num_tokens * self.layer_s(kind, num_tokens) / 100


def drafter(name: str, kind: str | None = None, capacity: int = 2, size: int = 0) -> DrafterView:
    return DrafterView(name, kind or name, capacity, 0, size)


def request(
    name: str, current: str = "", *, allowed: tuple[str, ...] = (), num_prompt: int = 10
) -> RequestView:
    return RequestView(name, current, allowed, num_prompt, num_prompt, 1000, 0)


@dataclass
class World:
    """Applies what a selector says, and checks that it may say it."""

    selector: Selector
    drafters: dict[str, DrafterView] = field(default_factory=dict)
    requests: dict[str, RequestView] = field(default_factory=dict)
    max_depth: int = 6

    def add(self, *views: DrafterView) -> None:
        self.drafters.update({view.name: view for view in views})

    def lose(self, name: str) -> None:
        del self.drafters[name]
        for key, view in self.requests.items():
            if view.current == name:
                self.requests[key] = replace(view, current="")

    def arrive(self, name: str, num_prompt: int = 10, allowed: tuple[str, ...] = ()) -> None:
        self.selector.begin(name, [7] * num_prompt)
        self.requests[name] = request(name, num_prompt=num_prompt, allowed=allowed)

    def leave(self, name: str) -> None:
        del self.requests[name]
        self.selector.forget(name)

    def pool(self) -> PoolView:
        places = [view.current for view in self.requests.values()]
        drafters = {name: replace(view, load=places.count(name)) for name, view in self.drafters.items()}
        return PoolView(drafters, Costs(), self.max_depth)

    def views(self) -> list[RequestView]:
        return [
            view if view.allowed else replace(view, allowed=tuple(self.drafters))
            for view in self.requests.values()
        ]

    def step(self, tokens: int = 2) -> dict[str, str]:
        """One slot for all requests."""
        views = self.views()
        chosen = self.selector.assign(views, self.pool())
        assert chosen.keys() == {view.request_id for view in views}
        for view in views:
            place = chosen[view.request_id]
            assert place == "" or (place in self.drafters and place in view.allowed)
            self.requests[view.request_id] = replace(
                self.requests[view.request_id],
                current=place,
                num_steps=view.num_steps + 1,
                num_context=view.num_context + tokens,
                num_remaining=view.num_remaining - tokens,
            )
        for name, view in self.pool().drafters.items():
            assert view.load <= view.capacity, name
        return chosen
