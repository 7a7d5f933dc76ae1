//! `/tokenize` and `/detokenize` in vLLM's formats, and their gRPC counterparts.

mod common;

use common::{Cluster, encode, grpc_channel, model_text, node::MODEL};
use proto::v1::{
    ChatMessage, Conversation, DetokenizeRequest, ListModelsRequest, TokenizeRequest,
    inference_client::InferenceClient, tokenize_request::Input,
};
use serde_json::{Value, json};
use tonic::Code;

const TEXT: &str = "Größe in <|im_end|> zones";

fn messages() -> Value {
    json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}])
}

#[tokio::test]
async fn tokenized_text_matches_the_prompt_of_a_completion() {
    let cluster = Cluster::start(1, 1, " ok").await;
    let answer = cluster.client.post("/tokenize", &json!({"model": MODEL, "prompt": TEXT})).await;
    let expected = json!({"count": encode(TEXT).len(), "max_model_len": 2048,
        "tokens": encode(TEXT), "token_strs": null});
    assert_eq!((answer.status.as_u16(), answer.json()), (200, expected));

    let long = "lorem ipsum ".repeat(2000);
    let body = json!({"prompt": long, "return_token_strs": true, "add_special_tokens": false});
    let answer = cluster.client.post("/tokenize", &body).await.json();
    // The router also tokenizes a text that exceeds the context.
    assert_eq!(answer["count"], encode(&long).len());
    let strings = answer["token_strs"].as_array().unwrap().iter();
    let strings: String = strings.map(|text| text.as_str().unwrap()).collect();
    assert_eq!(strings, long.replace(' ', "Ġ"));
}

#[tokio::test]
async fn token_strings_are_those_of_the_vocabulary() {
    let cluster = Cluster::start(0, 1, " ok").await;
    let body = json!({"prompt": "Größe\n of<|im_end|>", "return_token_strs": true});
    let answer = cluster.client.post("/tokenize", &body).await.json();
    let strings: Vec<&str> = answer["token_strs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap())
        .collect();
    // As `convert_ids_to_tokens` of transformers writes them, which vLLM returns.
    assert_eq!(strings.concat(), "GrÃ¶ÃŁeĊĠof<|im_end|>");
    assert_eq!(strings.last(), Some(&"<|im_end|>"));
}

#[tokio::test]
async fn tokenized_conversation_matches_the_prompt_of_a_chat() {
    let cluster = Cluster::start(0, 1, " ok").await;
    for kwargs in [json!({}), json!({"add_generation_prompt": false})] {
        let mut body = json!({"messages": messages()});
        body.as_object_mut().unwrap().extend(kwargs.as_object().unwrap().clone());
        let tokens = cluster.client.post("/tokenize", &body).await.json()["tokens"].clone();
        body["max_tokens"] = json!(1);
        body["return_token_ids"] = json!(true);
        let chat = cluster.client.post("/v1/chat/completions", &body).await.json();
        assert_eq!(chat["prompt_token_ids"], tokens);
    }
}

#[tokio::test]
async fn tokens_are_detokenized_to_their_text() {
    let cluster = Cluster::start(0, 1, " ok").await;
    let body = json!({"model": MODEL, "tokens": encode(TEXT)});
    let answer = cluster.client.post("/detokenize", &body).await;
    assert_eq!((answer.status.as_u16(), answer.json()), (200, json!({"prompt": TEXT})));
    let many = encode(&TEXT.repeat(500));
    let answer = cluster.client.post("/detokenize", &json!({"tokens": many})).await;
    assert_eq!(answer.json()["prompt"], TEXT.repeat(500));
    assert_eq!(
        cluster.client.post("/detokenize", &json!({"tokens": []})).await.json(),
        json!({"prompt": ""})
    );
}

#[tokio::test]
async fn invalid_tokenize_requests_name_their_field() {
    let cluster = Cluster::start(0, 1, " ok").await;
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 7}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": messages()}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/tokenize", json!({"prompt": "a", "add_special_tokens": 1}), "add_special_tokens"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens"),
        ("/detokenize", json!({"tokens": [49152]}), "tokens"),
        ("/detokenize", json!({"tokens": "1"}), "tokens"),
    ] {
        let answer = cluster.client.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path} {body}");
        assert_eq!(answer.error()["param"], param, "{path} {body}");
    }
}

#[tokio::test]
async fn text_too_long_to_tokenize_is_rejected_with_the_limit() {
    const MEBIBYTE: usize = 1 << 20;
    let cluster = Cluster::start(0, 1, " ok").await;
    let long = "x".repeat(MEBIBYTE + 1);
    let chat = json!([{"role": "user", "content": long}]);
    for (field, body) in
        [("prompt", json!({"prompt": long})), ("messages", json!({"messages": chat}))]
    {
        let answer = cluster.client.post("/tokenize", &body).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["param"]), (400, &json!(field)));
        assert!(answer.message().contains("at most 1048576"), "{}", answer.message());
    }
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let of =
        |text: String| TokenizeRequest { input: Some(Input::Text(text)), ..Default::default() };
    let status = client.tokenize(of(long)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("1048577 bytes"), "{status}");
}

#[tokio::test]
async fn tokens_with_too_long_a_text_are_rejected_with_the_limit() {
    const MEBIBYTE: usize = 1 << 20;
    let cluster = Cluster::start(0, 1, " ok").await;
    let model = model_text();
    let bytes_of = |id: &u32| model.tokenizer().token_bytes(*id).map_or(0, <[u8]>::len);
    let longest = (0..model.tokenizer().vocabulary_size()).max_by_key(bytes_of).unwrap();
    let count = MEBIBYTE / bytes_of(&longest);
    for (count, status) in [(count, 200_u16), (count + 1, 400)] {
        let body = json!({"tokens": vec![longest; count]});
        let answer = cluster.client.post("/detokenize", &body).await;
        assert_eq!(answer.status.as_u16(), status, "{count} tokens");
        if status == 400 {
            assert_eq!(answer.error()["param"], "tokens");
            assert!(answer.message().contains("at most 1048576"), "{}", answer.message());
        }
    }
}

#[tokio::test]
async fn grpc_tokenizes_and_lists_models_alike() {
    let cluster = Cluster::start(1, 1, " ok").await;
    let mut client = InferenceClient::new(grpc_channel(&cluster).await);
    let of = |input| TokenizeRequest { input: Some(input), ..Default::default() };
    let text = client.tokenize(of(Input::Text(TEXT.into()))).await.unwrap().into_inner();
    assert_eq!((text.ids, text.sequence_tokens_max), (encode(TEXT), 2048));

    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
        ..Default::default()
    };
    let conversation = Conversation {
        messages: vec![message("system", "Be short."), message("user", TEXT)],
        ..Default::default()
    };
    let chat = client.tokenize(of(Input::Conversation(conversation))).await.unwrap().into_inner();
    let http = cluster.client.post("/tokenize", &json!({"messages": messages()})).await.json();
    assert_eq!(json!(chat.ids), http["tokens"]);

    let back = DetokenizeRequest { model: String::new(), ids: chat.ids.clone() };
    let back = client.detokenize(back).await.unwrap().into_inner().text;
    assert_eq!(back, model_text().tokenizer().decode(&chat.ids, false));
    let outside = DetokenizeRequest { model: String::new(), ids: vec![49152] };
    let status = client.detokenize(outside).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("49152"), "{status}");

    let models = client.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!(models.len(), 1);
    let model = &models[0];
    assert_eq!((model.name.as_str(), model.root.as_str()), (MODEL, MODEL));
    assert_eq!((model.sequence_tokens_max, model.prefill_nodes, model.decode_nodes), (2048, 1, 1));
}
