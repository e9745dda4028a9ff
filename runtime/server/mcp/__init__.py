"""The MCP server: tools with which an AI assistant makes videos, over the HTTP API."""
