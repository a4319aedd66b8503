// The page /docs shows this service's OpenAPI document in Swagger UI.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
