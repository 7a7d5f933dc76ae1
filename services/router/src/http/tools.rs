//! Tool fields of a request body.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fields::Fields;
use crate::request::{
    error::{FieldError, refused},
    tools::{
        OfferedFunction, OfferedTools, TOOL_CHOICE, TOOLS, ToolChoice, check_count, check_name,
    },
};

/// Reads the tools that the model may call, if any.
pub fn read(fields: &Fields<'_>) -> Result<Option<OfferedTools>, FieldError> {
    let offered = offered(fields)?;
    let choice = choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let Some(choice) = choice else { return Ok(None) };
    let (definitions, functions) = offered.unwrap_or_default();
    OfferedTools::new(definitions, functions, choice, parallel)
}

/// Reads `tool_choice`; `None` if the model may call no tool.
fn choice(fields: &Fields<'_>) -> Result<Option<ToolChoice>, FieldError> {
    #[derive(Deserialize)]
    struct Named {
        r#type: String,
        function: Name,
    }
    #[derive(Deserialize)]
    struct Name {
        name: String,
    }
    let allowed =
        "auto, none, required, or an object with type function and a function with a name";
    let Some(choice) = fields.value::<Value>(TOOL_CHOICE, allowed)? else {
        return Ok(Some(ToolChoice::Auto));
    };
    let other = || refused(TOOL_CHOICE, &choice.to_string(), allowed);
    Ok(match &choice {
        Value::String(word) => match word.as_str() {
            "auto" => Some(ToolChoice::Auto),
            "none" => None,
            "required" => Some(ToolChoice::Required),
            _ => return Err(other()),
        },
        // serde also reads an array as a struct.
        Value::Object(object) if !object.get("function").is_some_and(Value::is_array) => {
            let named = Named::deserialize(&choice).map_err(|_| other())?;
            if named.r#type != "function" {
                return Err(other());
            }
            Some(ToolChoice::Named(named.function.name))
        }
        _ => return Err(other()),
    })
}

#[derive(Deserialize)]
struct Tool {
    r#type: String,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

/// Returns the tools as the client sent them, and their parsed functions; `None` without tools.
fn offered(fields: &Fields<'_>) -> Result<Option<(Value, Vec<OfferedFunction>)>, FieldError> {
    let allowed = "a list of tools, each with type function and a function with a name";
    let Some(text) = fields.raw(TOOLS) else { return Ok(None) };
    let definitions: Value =
        serde_json::from_str(text).map_err(|_| refused(TOOLS, text, allowed))?;
    let list = definitions.as_array().ok_or_else(|| refused(TOOLS, text, allowed))?;
    if list.is_empty() {
        return Ok(None);
    }
    check_count(list.len())?;
    let function = |(index, tool): (usize, &Value)| {
        let field = format!("tools[{index}]");
        // serde also reads an array as a struct.
        if tool.is_array() || tool["function"].is_array() {
            return Err(refused(&field, &tool.to_string(), allowed));
        }
        let read = Tool::deserialize(tool).map_err(|error| {
            FieldError::new(&field, format!("is no tool: {error}; allowed: {allowed}"))
        })?;
        let Function { name, strict, parameters, .. } = read.function;
        if read.r#type != "function" {
            return Err(refused(&format!("{field}.type"), &tool["type"].to_string(), "function"));
        }
        check_name(&format!("{field}.function.name"), &name)?;
        Ok(OfferedFunction {
            name,
            parameters,
            field: format!("{field}.function.parameters"),
            strict: strict.unwrap_or(false),
        })
    };
    let functions = list.iter().enumerate().map(function).collect::<Result<_, _>>()?;
    Ok(Some((definitions, functions)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_body(body: Value) -> Result<Option<OfferedTools>, String> {
        let body = body.to_string();
        read(&Fields::parse(body.as_bytes()).unwrap()).map_err(|error| error.to_string())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn tools_are_offered_unless_none_may_be_called() {
        let tools = json!([tool("f"), tool("g")]);
        let offered = read_body(json!({"tools": tools})).unwrap().unwrap();
        assert_eq!((&offered.definitions, offered.parallel), (&tools, true));
        let names: Vec<&str> = offered.functions.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((names, offered.choice), (vec!["f", "g"], ToolChoice::Auto));
        let one = json!({"tools": tools, "tool_choice": "auto", "parallel_tool_calls": false});
        assert!(!read_body(one).unwrap().unwrap().parallel);
        let named = json!({"type": "function", "function": {"name": "g"}});
        for (choice, expected) in
            [(json!("required"), ToolChoice::Required), (named, ToolChoice::Named("g".into()))]
        {
            let body = json!({"tools": tools, "tool_choice": choice});
            assert_eq!(read_body(body).unwrap().unwrap().choice, expected);
        }
        let strict = json!([{"type": "function", "function": {"name": "f", "strict": true,
            "parameters": {"type": "object"}}}]);
        let offered = read_body(json!({"tools": strict})).unwrap().unwrap();
        assert!(offered.functions[0].strict && offered.functions[0].parameters.is_some());
        for body in [
            json!({"tools": tools, "tool_choice": "none"}),
            json!({"tools": [], "tool_choice": "auto"}),
            json!({"tools": null}),
            json!({"parallel_tool_calls": true}),
        ] {
            assert_eq!(read_body(body), Ok(None));
        }
    }

    #[test]
    fn what_is_no_tool_or_no_choice_is_refused_by_name() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let with = |choice: Value| json!({"tools": [tool("f")], "tool_choice": choice});
        for (body, words) in [
            (
                json!({"tool_choice": "required"}),
                "tool_choice demands a call; allowed: only with tools",
            ),
            (json!({"tool_choice": named("f")}), "tool_choice is \"f\"; allowed: the name of a"),
            (with(named("g")), "tool_choice is \"g\"; allowed: the name of a function in tools"),
            (with(json!("any")), "tool_choice is \"any\"; allowed: auto, none, required"),
            (with(json!({"type": "function"})), "tool_choice is {\"type\":\"function\"}; allowed"),
            (with(json!({"type": "x", "function": {"name": "f"}})), "tool_choice is {\"type\":"),
            (with(json!({"type": "function", "function": ["f"]})), "tool_choice is {\"type\":"),
            (with(json!(7)), "tool_choice is 7"),
            (json!({"tools": {}}), "tools is {}"),
            (
                json!({"tools": [{"type": "function"}]}),
                "tools[0] is no tool: missing field `function`",
            ),
            (json!({"tools": [["function", tool("f")]]}), "tools[0] is [\"function\",{"),
            (json!({"tools": [tool("f"), tool("")]}), "tools[1].function.name is \"\""),
            (json!({"tools": vec![tool("f"); 129]}), "has 129 tools; allowed: at most 128"),
            (
                json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
                "tools[0].type is \"retrieval\"; allowed: function",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}),
                "tools[0] is no tool: invalid type",
            ),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls is 1"),
        ] {
            let said = read_body(body).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }
}
