"""Ray Serve applications, the OpenAI-compatible API and the command line."""
