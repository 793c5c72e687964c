"""The OpenAPI document describes every route and every field."""

from dovetail_server.protocol.anthropic.fields import CountRequest, MessagesRequest
from dovetail_server.protocol.fields import ChatRequest, CompletionRequest
from dovetail_server.protocol.responses.fields import ResponsesRequest

NOT_STORED = ("response_not_found", "file_not_found", "batch_not_found")


def test_the_openapi_document_has_every_route_and_field(server):
    document = server.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
    for path, operations in document["paths"].items():
        for method in operations:
            actual = server.send(method.upper(), path.replace("{name}", "demo"), "")
            if actual.status in (404, 405):
                assert actual.error["code"] in NOT_STORED, (method, path)
    assert {
        "/v1/completions",
        "/v1/models/{name}",
        "/v1/responses/{name}/cancel",
        "/v1/files/{name}/content",
        "/v1/batches/{name}/cancel",
        "/live",
    } <= document["paths"].keys()


def test_the_openapi_document_has_the_media_type_of_each_get_route(server):
    paths = server.get("/openapi.json").json["paths"]
    checked = set()
    for path, operations in paths.items():
        if "get" not in operations or "{name}" in path:
            continue
        actual = server.get(path)
        if actual.status != 200:
            continue
        kind = actual.headers["content-type"].partition(";")[0]
        documented = list(operations["get"]["responses"]["200"]["content"])
        assert documented in ([kind], ["*/*"]), path  # plugins may respond with any type
        checked.add(path)
    assert {"/", "/web/page.css", "/web/page.js", "/metrics", "/v1/models", "/live"} <= checked
