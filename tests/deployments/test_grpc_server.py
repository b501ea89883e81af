"""The gRPC service over a stand-in cell and a real client: answers as over HTTP, and calls that end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.grpc_config import GrpcConfig
from cluster.stream_messages import Rejected
from deployments.api_service import ApiService
from deployments.cell_clients import CellClients
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_mapping import ERROR_KEY, RETRY_KEY
from deployments.grpc_server import GrpcThread, make_server
from deployments.grpc_service import MOST_WATCHES
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

HI = pb.GenerateRequest(prompt="hi", max_tokens=100)


@pytest.fixture
async def channel(service: ApiService, free_port: int) -> AsyncIterator[grpc.aio.Channel]:
    config = GrpcConfig(enabled=True, port=free_port, default_deadline_s=0.5, max_message_bytes=4096)
    server = make_server(config, service)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as opened:
        yield opened
    await server.stop(None)


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.GenerationStub(channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    async def finish() -> None:
        if not isinstance(call, grpc.aio.UnaryStreamCall):
            await call
            return
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish()
    return caught.value


@pytest.mark.parametrize("chat", [False, True])
async def test_the_same_as_over_http_whole_and_streamed(
    stub: Any, http: httpx.AsyncClient, chat: bool
) -> None:
    message = pb.GenerateRequest(
        max_tokens=100, seed=5, n=2, logprobs=2, return_token_ids=True, stop=["never"]
    )
    body: dict[str, Any] = {"max_tokens": 100, "seed": 5, "n": 2, "return_token_ids": True, "stop": ["never"]}
    if chat:
        message.messages.add(role="user", content="hi")
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    else:
        message.prompt = "hi"
        body |= {"prompt": "hi", "logprobs": 2}
    whole = await stub.Generate(message)
    chunks = [chunk async for chunk in stub.GenerateStream(message)]
    response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    over_http = response.json()
    for index, theirs in enumerate(over_http["choices"]):
        ours = whole.choices[index]
        mine = [chunk.choice for chunk in chunks if chunk.choice.index == index]
        text = theirs["message"]["content"] if chat else theirs["text"]
        assert ours.text == text == "".join(choice.text for choice in mine) == ANSWER
        assert list(ours.token_ids) == theirs["token_ids"] == [t for c in mine for t in c.token_ids]
        assert ours.finish_reason == theirs["finish_reason"] == mine[-1].finish_reason
        assert list(ours.logprobs) == [entry for choice in mine for entry in choice.logprobs]
        logprobs = theirs["logprobs"]
        values = [e["logprob"] for e in logprobs["content"]] if chat else logprobs["token_logprobs"]
        assert [entry.logprob for entry in ours.logprobs] == values
        assert list(ours.prompt_token_ids) == list(mine[0].prompt_token_ids)
    assert whole.usage.completion_tokens == over_http["usage"]["completion_tokens"]
    assert whole.metrics.seed == over_http["metrics"]["seed"] == 5
    assert chunks[-1].usage == whole.usage
    told = MessageToDict(chunks[-1].metrics, preserving_proto_field_name=True)
    for name in ("slo", "speculative_decoding", "drafters", "tier"):
        assert set(told.get(name, {})) <= set(over_http["metrics"][name])
    assert told["speculative_decoding"]["num_spec_steps"] == "8"
    assert not any(chunk.HasField("metrics") for chunk in chunks[:-1])


async def test_stop_strings_before_the_least_tokens_end_nothing(stub: Any, cell: CellStandIn) -> None:
    cell.script = lambda submit: [*ids("a"), *ids("x"), *ids("b"), *ids("x")]
    message = pb.GenerateRequest(prompt="hi", max_tokens=100, stop=["x"], min_tokens=2)
    assert (await stub.Generate(message)).choices[0].text == "axb"
    chunks = [chunk async for chunk in stub.GenerateStream(message)]
    assert "".join(chunk.choice.text for chunk in chunks) == "axb"


async def test_the_receipt_has_every_field_of_http(http: httpx.AsyncClient) -> None:
    """A field added there must be added here, or it would be dropped silently."""
    receipt = (await http.post("/v1/completions", json={"prompt": "hi"})).json()["metrics"]
    assert set(receipt) <= set(pb.Metrics.DESCRIPTOR.fields_by_name)
    for name, value in receipt.items():
        field = pb.Metrics.DESCRIPTOR.fields_by_name[name]
        if isinstance(value, dict) and name != "drafters":
            assert set(value) <= set(field.message_type.fields_by_name), name


async def test_errors_are_statuses_with_details(stub: Any, cell: CellStandIn) -> None:
    for call in (stub.Generate, stub.GenerateStream):
        error = await failure(call(pb.GenerateRequest(prompt="hi", temperature=9)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert json.loads(dict(error.trailing_metadata())[ERROR_KEY])["param"] == "temperature"
        error = await failure(call(pb.GenerateRequest(prompt="hi", model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        error = await failure(call(pb.GenerateRequest(prompt="hi", request_id="a/b")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, "nobody could cancel it by that id"
        assert json.loads(dict(error.trailing_metadata())[ERROR_KEY])["param"] == "request_id"
    cell.reject = Rejected(request_id="", code="queue_full", message="Full.", retry_after_s=4)
    error = await failure(stub.GenerateStream(HI))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())[RETRY_KEY] == "4"
    error = await failure(stub.Generate(pb.GenerateRequest(prompt="x" * 5000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    cell.reject, cell.away = None, True
    assert not (await stub.Describe(pb.DescribeRequest())).ready


async def test_an_error_about_a_long_text_reaches_the_client(stub: Any) -> None:
    """It repeats a part of it, and metadata that is too long would take its place."""
    extra = json.dumps({"structured_outputs": {"regex": "(" + "🙂" * 200}}, ensure_ascii=False)
    error = await failure(stub.Generate(pb.GenerateRequest(prompt="a", extra_body_json=extra)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "`structured_outputs.regex` cannot be used" in (error.details() or "")


@pytest.mark.parametrize("data", [b"\x12\x03\xff\xfe\xfd", b"\xff\xff\xff"])
async def test_a_message_that_cannot_be_read_is_the_clients_fault(
    channel: grpc.aio.Channel, data: bytes
) -> None:
    for make, name in ((channel.unary_unary, "Generate"), (channel.unary_stream, "GenerateStream")):
        error = await failure(make(f"/flotilla.v1.Generation/{name}")(data))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in (error.details() or "")


async def test_cancel_ends_requests_by_their_id(stub: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.02
    one = stub.GenerateStream(pb.GenerateRequest(prompt="hi", max_tokens=200, request_id="one", n=2))
    other = stub.Generate(pb.GenerateRequest(prompt="hi", max_tokens=200, request_id="one-more"))
    await one.read()
    assert (await stub.Cancel(pb.CancelRequest(request_id="one"))).num_cancelled == 2
    error = await failure(one)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert "was cancelled" in str(error.details())
    assert (await stub.Cancel(pb.CancelRequest(request_id="one"))).num_cancelled == 0
    assert (await other).choices[0].text == ANSWER
    assert (await failure(stub.Cancel(pb.CancelRequest()))).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("how", ["cancel", "deadline", "default deadline", "close"])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_goes_away_ends_the_request(
    stub: Any, channel: grpc.aio.Channel, cell: CellStandIn, how: str, stream: bool
) -> None:
    cell.starved = True
    call = (stub.GenerateStream if stream else stub.Generate)(HI, timeout=0.1 if how == "deadline" else None)
    reading = asyncio.create_task(failure(call)) if how in ("deadline", "default deadline") else None
    await eventually(lambda: len(cell.submissions) == 1)
    if how == "cancel":
        call.cancel()
    elif how == "close":
        await channel.close()
    await eventually(lambda: cell.cancels == [cell.submissions[0].request_id])
    if reading is not None:
        assert (await reading).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_does_not_read_and_cancels_frees_its_request(
    stub: Any, cell: CellStandIn
) -> None:
    """The write that waits for the client is where Serve's proxy loses a cancellation."""
    cell.per_step, cell.pause_s = 1, 0.001
    for _ in range(20):
        num_cancels = len(cell.cancels)
        call = stub.GenerateStream(pb.GenerateRequest(prompt="hi", max_tokens=200, ignore_eos=True))
        await call.read()
        call.cancel()
        await eventually(lambda before=num_cancels: len(cell.cancels) == before + 1)


async def test_health_and_reflection(channel: grpc.aio.Channel, cell: CellStandIn) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "flotilla.v1.Generation"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    error = await failure(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    cell.ready = False
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_the_health_is_watched_by_so_many_at_most(channel: grpc.aio.Channel) -> None:
    """Nobody needs a key for it, and each watch is served for as long as it is open."""
    health: Any = health_pb2_grpc.HealthStub(channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(MOST_WATCHES)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    one_more = health.Watch(health_pb2.HealthCheckRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one_more.read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    watches[0].cancel()
    async with asyncio.timeout(5):
        while True:  # until the server hears of the end
            try:
                one_more = health.Watch(health_pb2.HealthCheckRequest())
                assert (await one_more.read()).status == health_pb2.HealthCheckResponse.SERVING
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
    for watch in (*watches, one_more):
        watch.cancel()
    asked = reflection_pb2.ServerReflectionRequest
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(
        iter([asked(list_services=""), asked(file_containing_symbol="flotilla.v1.Generation")])
    )
    listed, described = [answer async for answer in answers]
    names = {service.name for service in listed.list_services_response.service}
    assert {"flotilla.v1.Generation", "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


async def test_who_is_connected_to_a_cell_that_serves_asks_none(
    channel: grpc.aio.Channel, service: ApiService, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `/ready`: asked would be any of several, perhaps one that hangs, by whoever can connect."""
    await service.info()
    monkeypatch.setattr(CellClients, "can_serve", True)
    num_described = cell.num_described
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    described = await pb_grpc.GenerationStub(channel).Describe(pb.DescribeRequest())
    assert (described.ready, described.model.id) == (True, "demo")
    assert cell.num_described == num_described


async def test_best_of_and_prompt_logprobs_are_those_of_http(stub: Any, http: httpx.AsyncClient) -> None:
    body = {"prompt": "hi there", "n": 1, "best_of": 3, "max_tokens": 9, "seed": 1}
    whole = await stub.Generate(pb.GenerateRequest(**body))
    over_http = (await http.post("/v1/completions", json=body)).json()
    assert [choice.text for choice in whole.choices] == [choice["text"] for choice in over_http["choices"]]
    assert whole.usage.completion_tokens == over_http["usage"]["completion_tokens"]
    error = await failure(stub.GenerateStream(pb.GenerateRequest(**body)))
    assert "cannot be streamed" in str(error.details())


async def test_calls_of_tools_are_told_whole_and_streamed(stub: Any, cell: CellStandIn) -> None:
    cell.max_tokens = 2048  # tools told in words are long
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'
    cell.script = lambda submit: [*ids("Well. " + call), *codec().eos_ids]
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    message = pb.GenerateRequest(extra_body_json=json.dumps({"tools": [tool]}))
    message.messages.add(role="user", content="What is a?")
    whole = (await stub.Generate(message)).choices[0]
    streamed = [chunk.choice async for chunk in stub.GenerateStream(message)]
    assert whole.text == "".join(choice.text for choice in streamed)
    assert "tool_call" not in whole.text
    assert whole.finish_reason == streamed[-1].finish_reason == "tool_calls"
    assert (whole.tool_calls[0].name, json.loads(whole.tool_calls[0].arguments)) == ("look_up", {"word": "a"})
    news = [call for choice in streamed for call in choice.tool_calls]
    assert "".join(call.arguments for call in news) == whole.tool_calls[0].arguments
    assert news[0].name == "look_up"


async def test_a_drained_server_finishes_what_it_has_and_counts_it(
    cell: CellStandIn, service: ApiService, free_port: int
) -> None:
    cell.pause_s = 0.02
    made: list[ApiService] = []
    metrics = FrontEndMetrics("one")

    def make() -> ApiService:
        made.append(ApiService(cell, codec()))
        return made[-1]

    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, make, metrics)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.GenerateStream(HI)
        chunks = [await call.read()]
        draining = asyncio.create_task(thread.drain(10.0))
        while (chunk := await call.read()) is not grpc.aio.EOF:
            chunks.append(chunk)
        await draining
        assert "".join(chunk.choice.text for chunk in chunks) == ANSWER
        assert (await failure(stub.Generate(HI))).code() is grpc.StatusCode.UNAVAILABLE
    assert (
        'flotilla_grpc_calls_total{code="OK",front_end="one",method="GenerateStream"} 1.0' in metrics.render()
    )


async def test_a_call_that_took_too_long_is_counted_as_that(
    cell: CellStandIn, service: ApiService, free_port: int
) -> None:
    cell.starved = True
    metrics = FrontEndMetrics("one")
    server = make_server(GrpcConfig(enabled=True, port=free_port, default_deadline_s=0.2), service, metrics)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        for call in (stub.Generate(HI), stub.GenerateStream(HI)):
            assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        given_up = stub.GenerateStream(HI, timeout=30.0)
        await eventually(lambda: len(cell.submissions) == 3)
        given_up.cancel()
        await eventually(lambda: len(cell.cancels) == 3)
    await server.stop(None)
    counted = metrics.render()
    for method, code in (
        ("Generate", "DEADLINE_EXCEEDED"),
        ("GenerateStream", "DEADLINE_EXCEEDED"),
        ("GenerateStream", "CANCELLED"),
    ):
        assert f'calls_total{{code="{code}",front_end="one",method="{method}"}} 1.0' in counted


async def test_a_server_that_nobody_asks_is_soon_drained(cell: CellStandIn, free_port: int) -> None:
    """Its loop ends with it, and takes the answer along."""
    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))
    async with asyncio.timeout(10.0):
        await thread.drain(300.0)
        for _ in range(20):  # while its loop ends, and when it has
            await thread.drain(300.0)


async def test_who_watches_its_health_does_not_keep_a_server_from_ending(
    cell: CellStandIn, free_port: int
) -> None:
    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(10.0):
            draining = asyncio.create_task(thread.drain(300.0))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            await draining


async def test_a_server_with_calls_that_do_not_end_is_drained_when_its_time_is_cut_short(
    cell: CellStandIn, free_port: int
) -> None:
    cell.pause_s = 60.0
    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.GenerateStream(HI)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.3)
        draining = asyncio.create_task(thread.drain(300.0))
        await asyncio.sleep(0.3)
        assert not draining.done()
        async with asyncio.timeout(10.0):
            await asyncio.gather(draining, thread.drain(0.0))
        with pytest.raises(grpc.aio.AioRpcError, match=r"This front end was removed") as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        told = dict(caught.value.trailing_metadata() or ())
        assert json.loads(told[ERROR_KEY])["code"] == "draining"
        assert told[RETRY_KEY] == "1"
