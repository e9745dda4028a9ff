"""The web app's server without pages: security middleware, job routes, visitors of a share link, the tunnel to it."""
