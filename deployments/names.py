"""Names under which Ray Serve knows the application's parts; for those who only look them up."""

APP_NAME = "flotilla"
FRONT_END_NAME = "FrontEnd"
