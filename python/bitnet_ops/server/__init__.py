"""The server of one machine: OpenAI's, Anthropic's and Ollama's HTTP interfaces, and a page.

A request's way: `connection` and `security` (limits, keys) -> `app` (routes, errors) -> a dialect
(its fields become an `exchange.Ask`) -> `service` (gate, prompt, engine) -> the engine's thread ->
`service.Answer` (tokens become `exchange.Delta`s) -> the dialect (deltas become its objects) ->
`http.EventStream`.
Needs the extra `server`.
"""
